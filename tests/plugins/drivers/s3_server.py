"""moto's S3 server on a free port: run by the Python of `S3_PYTHON`.

It prints its URL, and answers each line of its input with a line of JSON, until its input ends:

- `stop`: refuse connections, and keep the objects; `start`: serve them again under the same URL;
- `list`: the objects, `{key: ETag}`; `save FOLDER`: write them there;
- `half KEY`: begin the upload of an object in parts, send one, and do not complete it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-not-found,unused-ignore]
from moto.server import ThreadedMotoServer  # type: ignore[import-not-found,unused-ignore]

BUCKET = "bucket"


def serve(port: int = 0) -> Any:
    """A server that runs in a thread. All servers of a process have the same objects."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    return server


def main() -> None:
    """Serve until the input ends."""
    server = serve()
    _, port = server.get_host_and_port()
    url = f"http://127.0.0.1:{port}"
    client = boto3.client(
        "s3", endpoint_url=url, aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1"
    )
    client.create_bucket(Bucket=BUCKET)
    print(url, flush=True)
    for line in sys.stdin:
        word, _, argument = line.strip().partition(" ")
        answer: Any = None
        if word == "stop":
            server.stop()
        elif word == "start":
            server = serve(port)
        elif word == "half":
            begun = client.create_multipart_upload(Bucket=BUCKET, Key=argument)["UploadId"]
            client.upload_part(Bucket=BUCKET, Key=argument, PartNumber=1, UploadId=begun, Body=b"half")
        else:
            found = client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
            answer = {each["Key"]: each["ETag"] for each in found}
            if word == "save":
                for key in answer:
                    client.download_file(BUCKET, key, str(Path(argument) / key.rpartition("/")[2]))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
