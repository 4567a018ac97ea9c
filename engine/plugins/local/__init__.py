"""transformers in this process: the backend where a spec names none.

spec.py      the section `backend`
backend.py   the backend: requests, weights, also new ones of a training, statistics
worker.py    the thread that generates
rows.py      the sequences of a batch
kv.py        their keys and values, and attention over them; passes of a fixed shape
sampler.py   logits to tokens, as the sampling parameters say
load.py      the model
vision.py    models with images
tiny_lm.py   tiny models with random weights, made here: a language model
tiny_vlm.py  a model with images
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="local",
    about="Models of transformers in this process as the backend of a policy",
    backends={"local": "engine.plugins.local.spec:LocalBackendSpec"},
    models={
        "tiny-qwen2_5-vl": "engine.plugins.local.tiny_vlm:ENTRY",
        "tiny-qwen2": "engine.plugins.local.tiny_lm:ENTRY",
    },
    weight_syncs={"local": "engine.plugins.local.backend:LocalSync"},
)
