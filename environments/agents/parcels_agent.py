"""An agent program that sends parcels: it asks the model for the gate of each town, and posts a reward for each reply.

`specs/train_agent.yaml` runs it, and trains the model on its requests. It uses the standard library alone; only the
variables EPISODE_TASK and EPISODE_REWARD_URL are the engine's. The model is not told the gates: it learns them from
rewards.
"""

from __future__ import annotations

import http.client
import json
import os
from typing import Any
from urllib.parse import urlsplit

GATES = {
    "Bern": "C",
    "Cork": "A",
    "Graz": "D",
    "Lyon": "B",
    "Oslo": "D",
    "Pisa": "A",
    "Riga": "B",
    "Turku": "C",
}
"""The gate of each town."""


def main() -> None:
    """Send the parcels of one task."""
    towns = json.loads(os.environ["EPISODE_TASK"])["fields"]["towns"]
    base, reward = urlsplit(os.environ["OPENAI_BASE_URL"]), urlsplit(os.environ["EPISODE_REWARD_URL"])
    connection = http.client.HTTPConnection(base.netloc, timeout=600)
    messages: list[dict[str, Any]] = []
    last = ""
    for town in towns:
        messages.append({"role": "user", "content": f"{last}Parcel for {town}."})
        asked = {"model": os.environ["OPENAI_MODEL"], "messages": messages}
        answer = post(connection, f"{base.path}/chat/completions", asked)
        message = answer["choices"][0]["message"]
        right = (message["content"] or "").strip() == f"{town} {GATES[town]}"
        value = (1 if right else -1) / len(towns)
        post(connection, reward.path, {"response_id": answer["id"], "value": value})
        last = "Sent. " if right else "Lost. "
        messages.append(message)


def post(connection: http.client.HTTPConnection, path: str, body: Any) -> Any:
    """The answer to a request."""
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    answer = json.load(response)
    if response.status != 200:
        raise SystemExit(json.dumps(answer))
    return answer


if __name__ == "__main__":
    main()
