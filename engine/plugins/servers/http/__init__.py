"""HTTP/1.1 for backends with servers. It knows nothing about what the servers serve.

client.py   requests to one server, over connections that stay open; API keys
reply.py    where a reply ends; what can go wrong with one, `Retry-After`; one that refuses a request, as a typed error
"""
