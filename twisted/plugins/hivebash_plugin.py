"""The twistd command ``hivebash``. Only names here: listing the plugins must not import the package."""

from twisted.application.service import ServiceMaker

hivebash = ServiceMaker(
    "hivebash", "hivebash.service", "Run an agent's shell commands in the background, over MCP.", "hivebash"
)
