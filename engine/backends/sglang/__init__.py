"""SGLang servers over their native HTTP API.

client.py   the backend, with its checks of servers
wire.py     its dialect; requests with images
control.py  weights, adapters and pauses
checks.py   test requests; what a router drops
images.py   whether a server sees the pixels of the training rows
verify.py   compares a prompt's log-probs with those of the model's files, if the spec asks for it
"""
