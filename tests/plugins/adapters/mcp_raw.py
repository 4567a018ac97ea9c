"""An MCP server over stdio, written without the package, that fails as it is told.

    python mcp_raw.py [changed | endless | control]

`changed`: from its second start on it offers another tool; `endless`: its list of tools does not end; `control`: the name of one
has a control sequence. Tools: `add` (read-only), `next` (counts its calls), and `misbehave(how)`: die, hang, garbage, flood,
error, huge, image.
"""

import json
import os
import sys
import time
from pathlib import Path

TOOLS = [
    {
        "name": "add",
        "description": "Add two integers.",
        "inputSchema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
        "annotations": {"readOnlyHint": True},
    },
    {"name": "next", "description": "Count.", "inputSchema": {"type": "object", "properties": {}}},
    {
        "name": "misbehave",
        "description": "Fail.",
        "inputSchema": {"type": "object", "properties": {"how": {"type": "string"}}, "required": ["how"]},
    },
]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4z8DwHwAFAAH/iZk9HQAAAABJRU5ErkJggg=="
count = 0


def text(words, **more):
    return {"content": [{"type": "text", "text": words}], **more}


def misbehave(how):
    if how == "die":
        print("I was told to die", file=sys.stderr, flush=True)
        os._exit(3)
    if how == "hang":
        time.sleep(3600)
    if how == "garbage":
        print("}{ this is no message", flush=True)
        return None
    if how == "flood":
        for _ in range(2000):
            print("}{ this is no message")
        for _ in range(40):
            print("x" * 100_000, file=sys.stderr, flush=True)
        return text("flooded")
    if how == "shape":
        return {"content": "not a list"}
    if how == "error":
        return text("I was told to fail", isError=True)
    if how == "huge":
        return text("x" * 2_000_000)
    if how == "image":
        return {"content": [{"type": "image", "data": PIXEL, "mimeType": "image/png"}]}
    return text(f"no {how}")


def answer(method, params):
    global count
    if method == "initialize":
        info = {"name": "raw", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "ping":
        return {}
    if method == "tools/list":
        if "endless" in sys.argv:
            return {"tools": [{**TOOLS[0], "name": f"t{n}"} for n in range(500)], "nextCursor": "more"}
        if "control" in sys.argv:
            return {"tools": [*TOOLS, {**TOOLS[0], "name": "a\x1b[2Jb"}]}
        return {"tools": TOOLS}
    arguments = params.get("arguments") or {}
    match params["name"]:
        case "add":
            return text(str(arguments["a"] + arguments["b"]))
        case "next":
            count += 1
            return text(str(count))
        case _:
            return misbehave(arguments["how"])


def main():
    starts = Path("starts.txt")
    with starts.open("a") as file:
        file.write("x")
    if "changed" in sys.argv and len(starts.read_text()) > 1:
        TOOLS.pop()
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            result = answer(request["method"], request.get("params") or {})
            if result is not None:
                print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)


main()
