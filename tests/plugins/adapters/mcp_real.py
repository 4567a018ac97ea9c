"""The same tools as `mcp_raw.py`, by the package's own server: `python mcp_real.py stdio | http PORT`."""

import sys

try:
    from mcp.server.mcpserver import MCPServer as Server

    VERSION = 2
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server

    VERSION = 1

PORT = int(sys.argv[2]) if len(sys.argv) > 2 else 0
server = Server("real") if VERSION == 2 else Server("real", port=PORT)
counted = 0


@server.tool()
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


@server.tool()
def following() -> str:
    """Count."""
    global counted
    counted += 1
    return str(counted)


@server.tool()
def refuse() -> str:
    """Fail."""
    raise ValueError("not today")


if sys.argv[1] == "stdio":
    server.run("stdio")
elif VERSION == 2:
    server.run("streamable-http", port=PORT)
else:
    server.run("streamable-http")
