"""SGLang servers over their native HTTP API.

client.py        the backend
attempts.py      sends a request until a server answers it; retries and aborts
request_body.py  the body of a request to /generate
reply_body.py    the body of its reply, checked to the token
resume.py        continues a reply that was interrupted
server.py        one server
pool.py          which server a request goes to, and which servers are there
control.py       weights, adapters and pauses
checks.py        checks of the servers before the first episode
images.py        whether a server sees the pixels of the training rows
verify.py        compares a prompt's log-probs with those of the model's files, if the spec asks for it
"""
