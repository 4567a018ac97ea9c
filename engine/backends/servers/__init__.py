"""What backends share whose servers take token ids and report token ids: SGLang and vLLM.

dialect.py     how the servers of one kind write requests and replies, as data
backend.py     one reply: tries, deadlines, interruptions, aborts
reply_call.py  the request of a reply: sent when a slot is free, read where its reply arrives
wire.py        the text of prompts, kept from turn to turn; a reply as ids and log-probs, joined where
               it was interrupted
pool.py        the servers, and which one a request goes to
checks.py      what a backend checks of its servers before the first episode
launched.py    servers that a run starts: what starts them is found by the point `launchers`
"""
