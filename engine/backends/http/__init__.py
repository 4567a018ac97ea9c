"""HTTP/1.1 for backends with servers. It knows nothing about what the servers serve.

client.py      requests to one server, over connections that stay open
connection.py  one connection: a request is sent, its reply is read, then the next
framing.py     where a reply ends
chunked.py     where a chunked body ends
reply.py       a reply, what can go wrong with one, `Retry-After`
refusal.py     replies that refuse a request, as typed errors
retries.py     failed tries of one request, and the pauses between them
outage.py      requests wait while no server can be reached
pace.py        limits of requests and tokens a minute
keys.py        API keys
"""
