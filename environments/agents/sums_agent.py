"""An agent program with a tool: it lets the model use a calculator until it answers, and writes its reward.

`specs/agent_tools.yaml` runs it. It is an ordinary client of OpenAI's Chat Completions, with the standard library
alone; only the variables EPISODE_TASK and EPISODE_REWARD_FILE are the engine's.
"""

from __future__ import annotations

import ast
import json
import operator
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_REQUESTS = 4
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Work out an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "Such as 3 * (4 + 5)."}},
                "required": ["expression"],
            },
        },
    }
]
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / and parentheses, or what is wrong with it."""
    try:
        value = _value(ast.parse(expression[:200].strip(), mode="eval").body)
        return str(int(value) if value == int(value) else round(value, 6))
    except (ArithmeticError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"error: {error}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("write numbers and + - * / ( ) only")


def examples() -> list[dict[str, Any]]:
    """The instruction, and conversations that show a small model how to call. Its template shows calls as text only."""
    messages = [{"role": "system", "content": "Use the calculator for every problem. Then say: The answer is 5."}]
    for question, expression, answer in (
        ("What is 12 + 7 * 3?", "12 + 7 * 3", "33"),
        ("Ida has 6 boxes with 8 pears in each and 5 more. How many pears are there?", "6 * 8 + 5", "53"),
        ("Max has 9 bags of 14 nuts and gives away 6. How many nuts are left?", "9 * 14 - 6", "120"),
    ):
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"<call>calculate({expression})</call>"},
            {"role": "user", "content": answer},
            {"role": "assistant", "content": f"The answer is {answer}."},
        ]
    return messages


def chat(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of the model's reply."""
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": TOOLS}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            message: dict[str, Any] = json.load(reply)["choices"][0]["message"]
            return message
    except urllib.error.HTTPError as error:
        raise SystemExit(error.read().decode()) from None


def main() -> None:
    """Let the model answer one question."""
    fields = json.loads(os.environ["EPISODE_TASK"])["fields"]
    messages = [*examples(), {"role": "user", "content": fields["question"]}]
    answer, used = "", False
    for _ in range(MAX_REQUESTS):
        message = chat(messages)
        messages.append(message)
        calls = message.get("tool_calls") or []
        for call in calls:
            used = True
            arguments = json.loads(call["function"]["arguments"])
            result = calculate(str(arguments.get("expression")))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not calls:
            answer = message["content"] or ""
            break
    numbers = re.findall(r"-?\d+(?:\.\d+)?", answer.replace(",", ""))
    right = bool(numbers) and float(numbers[-1]) == float(fields["answer"])
    reward = {"correct": float(right), "used_tool": 0.1 if used else 0.0}
    Path(os.environ["EPISODE_REWARD_FILE"]).write_text(json.dumps(reward), encoding="utf-8")


if __name__ == "__main__":
    main()
