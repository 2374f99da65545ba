// Uses every tool of a running server once, as a program built on the official npm client would.
// usage: node round.mjs URL
import assert from 'node:assert/strict';
import { Client } from '@modelcontextprotocol/sdk/client/index.js';
import { StreamableHTTPClientTransport } from '@modelcontextprotocol/sdk/client/streamableHttp.js';

const client = new Client({ name: 'round', version: '1' });
await client.connect(new StreamableHTTPClientTransport(new URL(process.argv[2])));
assert.equal(client.getServerVersion().name, 'bash');

// After listTools the client checks structuredContent against each tool's outputSchema.
const { tools } = await client.listTools();
assert.deepEqual(tools.map((tool) => tool.name).sort(), ['kill', 'run', 'status']);

async function call(name, args, options) {
  const result = await client.callTool({ name, arguments: args }, undefined, options);
  assert.ok(!result.isError, `${name}: ${JSON.stringify(result)}`);
  return { text: result.content[0].text, ...result.structuredContent };
}

const hello = await call('run', { cmd: 'echo hello', wait_seconds: 10 });
assert.equal(hello.status, 'done');
assert.equal(hello.exit_code, 0);
assert.equal(hello.stdout_tail, 'hello\n');

const long = await call('run', { cmd: 'sleep 300', wait_seconds: 0 });
assert.ok(long.text.startsWith(`task started: id=${long.id}`), long.text);
assert.equal((await call('status', { id: long.id })).status, 'running');
assert.ok((await call('status', {})).tasks.some((task) => task.id === long.id));

await call('kill', { id: long.id, force: true });
const killed = await call('status', { id: long.id, wait_seconds: 10 });
assert.equal(killed.status, 'killed');
assert.equal(killed.signal, 'SIGKILL');
assert.equal(killed.exit_code, null);

// With onprogress the client sends a progressToken, and the answer comes as an event stream.
const progress = [];
const slept = await call('run', { cmd: 'sleep 3', wait_seconds: 10 }, { onprogress: (note) => progress.push(note) });
assert.equal(slept.status, 'done');
assert.ok(progress.length > 0, 'no progress notification arrived');

const refused = await client.callTool({ name: 'run', arguments: { cmd: ' ' } });
assert.equal(refused.isError, true);

await client.close();
console.log('npm client: ok');
