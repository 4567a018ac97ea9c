"""What backends share whose servers take token ids and report token ids: SGLang and vLLM.

backend.py   one reply: tries, deadlines, interruptions, aborts
reply_call.py  the request of a reply: sent when a slot is free, read where its reply arrives
request.py   the text of prompts, kept from turn to turn
reply.py     a reply as ids and log-probs, and what can be wrong with one
resume.py    continues a reply that was interrupted
server.py    one server
pool.py      which server a request goes to, and which servers are there
requests.py  test requests before the first episode
launched.py  servers that a run starts: what starts them is found by the point `launchers`
"""
