"""SGLang servers over their native HTTP API.

client.py   the backend
wire.py     the bodies of a request to /generate and of its reply, checked to the token
control.py  weights, adapters and pauses
checks.py   checks of the servers before the first episode
images.py   whether a server sees the pixels of the training rows
verify.py   compares a prompt's log-probs with those of the model's files, if the spec asks for it
"""
