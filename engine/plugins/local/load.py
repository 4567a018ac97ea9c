"""The model in this process: its precision, its packed forward pass, and the check of that pass when it is loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from inspect import signature
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from engine.errors import BackendError
from engine.plugins.local.kv import ATTENTION, TILE, KVRows, Plan, RowChunk, RowsCache, Tile, attend
from engine.tokens.catalogue import no_bars
from engine.tokens.experts import ExpertLayout, expert_layout
from engine.train.routing import is_routing, routers_of

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Maximum mean absolute difference between log-probs of the packed pass and of the model's own pass, in nats."""


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the data type. `auto`: float32 on a CPU, where log-probs equal a recomputation; the GPU's 16-bit type on a
    GPU."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.float32


def stash_budget(device: torch.device) -> int:
    """Maximum memory for stashed sequences, in bytes: an eighth of the free memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 8
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        free = 4 << 30
    return int(free) // 8


class BatchedModel:
    """A decoder whose forward pass takes tokens of many sequences at once, without padding.

    Not thread-safe: use it in one thread only.
    """

    images_computed = 0
    """Images whose features were computed; 0 for a model without a vision tower."""
    reuses_prefixes = True
    """Whether a request may reuse the cached prefix of another."""
    auto_class = "AutoModelForCausalLM"
    """The class of transformers that loads the model."""
    attention: str | dict[str, str] = ATTENTION
    """The attention of its text layers, as transformers takes it."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        rows: int,
        *,
        repeatable: bool = False,
        experts: bool = False,
    ) -> None:
        """Load the model and check the packed pass.

        Args:
            folder: The model's folder.
            device: The device of the model.
            dtype: The data type of its weights.
            rows: Maximum number of sequences in one pass.
            repeatable: A token's logits are bit-identical in every batch; see kv.py.
            experts: Keep the experts of each token beside its cached values.

        Raises:
            BackendError: Kind `no_experts`: the model has none; `unsupported_model`: they cannot be read, or it is not
                a causal decoder with standard attention, or logits depend on the batch.
        """
        from transformers import AutoConfig
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
        self.device, self.dtype = device, dtype
        try:
            self.config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            self.model: Any = self._open(folder)
        except (OSError, ValueError) as error:
            why = str(error).partition("\n")[0].partition(". ")[0]
            raise BackendError(
                f"{folder} is not a causal model with standard attention: {why}. "
                "Name another one, or serve it with `backend: {kind: sglang}`.",
                kind="unsupported_model",
            ) from error
        self.model.to(device).eval()
        text = self.config.get_text_config()
        self.context: int | None = getattr(text, "max_position_embeddings", None)
        self.vocab: int = int(self.model.get_output_embeddings().weight.shape[0])
        self.repeatable = repeatable
        self._spare = rows
        self.store = KVRows(int(text.num_hidden_layers), rows + repeatable)
        self._cache = RowsCache(self.store)
        takes = signature(self.model.forward).parameters
        self._cache_name = "cache" if "cache" in takes else "past_key_values"  # transformers before 5.24
        self.layout = self._watch_routers(folder) if experts else None
        """The model's experts, where they are kept."""
        self._check_logprobs(folder, rows)
        if repeatable:
            self._check_repeatable(folder)

    def _open(self, folder: Path) -> Any:
        """Load the model of transformers."""
        import transformers

        with no_bars():
            return getattr(transformers, self.auto_class).from_pretrained(
                folder, dtype=self.dtype, attn_implementation="sdpa", trust_remote_code=False
            )

    def _watch_routers(self, folder: Path) -> ExpertLayout:
        """Store the choices of the model's routers in each forward pass.

        Raises:
            BackendError: See `__init__`.
        """
        layout, routers = expert_layout(self.config.to_dict()), routers_of(self.model)
        if layout is None:
            raise BackendError(
                f"backend.routed_experts: the model in {folder} has no experts, so no routing is reported: remove the "
                "key",
                kind="no_experts",
            )
        if sorted(routers) != list(layout.sparse):
            raise BackendError(
                f"backend.routed_experts: {type(self.model).__name__} has routers in layers {sorted(routers)}, and its "
                f"configuration declares experts in layers {list(layout.sparse)}; remove the key",
                kind="unsupported_model",
            )
        for layer, router in routers.items():
            router.register_forward_hook(partial(self._store_choices, layer))
        return layout

    def _store_choices(self, layer: int, router: Any, inputs: Any, output: Any) -> None:
        if self._cache.plan is None:  # the model's own pass, in a check
            return
        if not is_routing(output):
            raise BackendError(
                f"backend.routed_experts: the choices of {type(router).__name__} cannot be read; remove the key",
                kind="unsupported_model",
            )
        self.store.write("experts", layer, output[2].to(torch.int16)[:, None], self._cache.plan)

    def _random_ids(self, length: int, seed: int) -> torch.Tensor:
        """Ids for the checks, int64 [2, length]."""
        return torch.randint(0, self.vocab, (2, length), generator=torch.Generator().manual_seed(seed))

    def _inputs(self, chunks: Sequence[RowChunk], plan: Plan) -> dict[str, Any]:
        """Arguments of the model's forward pass: the tokens of the chunks, packed into one sequence, and their
        positions."""
        tokens = torch.tensor([token for chunk in chunks for token in chunk.ids], device=self.device)[None]
        return {"input_ids": tokens, "position_ids": plan.positions[None]}

    def forward(self, chunks: Sequence[RowChunk], wanted: Sequence[int]) -> torch.Tensor:
        """Compute one forward pass.

        Args:
            chunks: First those of one token, ordered by row. The rows' earlier tokens are in the cache.
            wanted: Indices of the chunks whose last token's logits are returned.

        Returns:
            float32 [wanted, vocab].
        """
        self.store.reserve(max(TILE, *(chunk.past + len(chunk.ids) for chunk in chunks)) + 1)
        return self._forward_repeatable(chunks, wanted) if self.repeatable else self._forward_packed(chunks, wanted)

    def _forward_packed(self, chunks: Sequence[RowChunk], wanted: Sequence[int]) -> torch.Tensor:
        """Compute `forward` in one pass of the model."""
        ends = list(accumulate(len(chunk.ids) for chunk in chunks))
        keep = torch.tensor([ends[index] - 1 for index in wanted] or [ends[-1] - 1], device=self.device)
        plan = Plan(chunks, self.device)
        with torch.inference_mode(), self._cache as cache:
            cache.plan = plan
            named = self._inputs(chunks, plan) | {self._cache_name: cache}
            out = self.model(**named, use_cache=True, logits_to_keep=keep)
            logits: torch.Tensor = out.logits[0].float()
            return logits if wanted else logits[:0]

    def _forward_repeatable(self, chunks: Sequence[RowChunk], wanted: Sequence[int]) -> torch.Tensor:
        """Compute `forward` in tiles of a fixed number of tokens."""
        tokens: list[tuple[int, int, int]] = []
        ends = []
        for chunk in chunks:
            tokens += [(token, chunk.row, chunk.past + place) for place, token in enumerate(chunk.ids)]
            ends.append(len(tokens) - 1)
        keep = [ends[index] for index in wanted]
        found: dict[int, torch.Tensor] = {}
        with torch.inference_mode(), self._cache as cache:
            for start in range(0, len(tokens), TILE):
                cache.plan = tile = Tile(tokens[start : start + TILE], self._spare, self.device)
                here = [at for at in keep if start <= at < start + tile.count]
                out = self.model(
                    input_ids=tile.ids[None],
                    position_ids=tile.positions[None],
                    use_cache=True,
                    logits_to_keep=torch.arange(TILE if here else 1, device=self.device),
                    **{self._cache_name: cache},
                )
                found |= {at: out.logits[0, at - start].float() for at in here}
        return torch.stack([found[at] for at in keep]) if keep else torch.empty((0, self.vocab), device=self.device)

    def _check_repeatable(self, folder: Path) -> None:
        """Check that a sequence gives the same bits alone and in other chunks, in another row, beside another sequence.

        Raises:
            BackendError: Kind `unsupported_model`: the bits differ.
        """
        length = min(2 * TILE + 5, self.context or TILE)
        ids, others = self._random_ids(length, 1).tolist()
        last = self._spare - 1
        try:
            one, other = self._checked_pieces(length)
            alone = self._last_logits(0, ids, one, None)
            kept = self.store.take(0, length)
            among = self._last_logits(last, ids, other, others if last else None)
            again = self.store.take(last, length)
            same = torch.equal(alone, among) and all(torch.equal(kept[name], again[name]) for name in kept)
        finally:
            self.store.tensors.clear()
        if not same:
            raise BackendError(
                f"`backend.deterministic: true`: on {self.device} a token's logits depend on its position in the batch "
                f"for {type(self.model).__name__} ({folder}); remove the key, or use another device",
                kind="unsupported_model",
            )

    def _checked_pieces(self, length: int) -> tuple[list[int], list[int]]:
        """Sizes of the chunks in which the check computes a sequence, first alone, then beside another one."""
        return [length - 1, 1], [5, TILE - 2, 1, length - TILE - 4]

    def _last_logits(self, row: int, ids: list[int], sizes: list[int], others: list[int] | None) -> torch.Tensor:
        """Logits [1, vocab] after a sequence that is computed in chunks, beside equal chunks of another sequence in row
        0."""
        at, logits = 0, torch.empty(0)
        for size in sizes:
            chunks = [RowChunk(row=row, ids=ids[at : at + size], past=at)]
            if others is not None:
                chunks.insert(0, RowChunk(row=0, ids=others[at : at + size], past=at))
            logits = self.forward(chunks, [len(chunks) - 1])
            at += size
        return logits

    def _check_logprobs(self, folder: Path, rows: int) -> None:
        """Compare log-probs of the packed pass, in chunks and beside another sequence, with the model's own pass."""
        length = min(24, self.context or 24)
        ids = self._random_ids(length, 0)
        with torch.inference_mode():
            expected = self.model(input_ids=ids.to(self.device)).logits.float().log_softmax(-1)
        used = list(range(min(2, rows)))
        try:
            self.model.set_attn_implementation(self.attention)
            logprobs = []
            for start, end in pairwise((0, length - 8, length - 4, length - 1, length)):
                chunks = [RowChunk(row=row, ids=ids[row, start:end].tolist(), past=start) for row in used]
                logprobs.append(self.forward(chunks, used).log_softmax(-1))
        except (TypeError, ValueError, AttributeError, AssertionError, IndexError, RuntimeError) as error:
            raise BackendError(
                f"the local backend cannot run {type(self.model).__name__} ({folder}): {error}; "
                "it supports causal decoders with standard attention. Serve this model with `backend: {kind: sglang}`.",
                kind="unsupported_model",
            ) from error
        finally:
            self.store.tensors.clear()
        wanted = expected[used][:, [length - 5, length - 2, length - 1]]
        apart = float((torch.stack(logprobs[1:], dim=1) - wanted).abs().mean())
        if not apart <= _TOLERANCE[self.dtype]:
            raise BackendError(
                f"the local backend's log-probs for {type(self.model).__name__} ({folder}) differ from the model's own "
                f"by {apart:.3g} on average; "
                "serve this model with `backend: {kind: sglang}`",
                kind="unsupported_model",
            )


def copy_weights(model: Any, state: dict[str, torch.Tensor]) -> None:
    """Replace all weights of a model, or none if they do not fit.

    A weight has the shape of the parameter that it replaces.

    Raises:
        BackendError: Names or shapes differ from the model's.
    """
    parameters = model.state_dict()
    replaced = {parameters[name].data_ptr() for name in state if name in parameters}
    problems = {
        "unknown": [name for name in state if name not in parameters],
        "of another shape": [
            name for name in state if name in parameters and parameters[name].shape != state[name].shape
        ],
        "missing": [name for name, value in parameters.items() if value.data_ptr() not in replaced],
    }
    for problem, names in problems.items():
        if names:
            raise BackendError(
                f"the new weights do not fit the model: {len(names)} {problem}, such as {names[0]!r}",
                kind="bad_weights",
            )
    with torch.no_grad():
        for name, value in state.items():
            parameters[name].copy_(value)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a folder's safetensors files.

    The tensors have the shapes in the files.

    Raises:
        BackendError: The folder has no safetensors files.
    """
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BackendError(f"{folder} has no safetensors files", kind="bad_weights")
    state: dict[str, torch.Tensor] = {}
    for file in files:
        state |= load_file(file)
    return state
