"""Background shell tasks for AI agents, served over MCP."""
