"""A pack -> the log-probs of its labels, by a transformers causal model that is checked against its own forward pass.

Invariants of packs with images:
- The vision tower encodes an image once per pass, for any number of rows and positions, with every version of
  transformers.
- Position ids are those of the model's own `get_rope_index`, applied to each row by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.errors import TrainError
from engine.schemas.experts import expert_dtype
from engine.store.rows.row import TrainingRow
from engine.tokens.catalogue import no_bars
from engine.tokens.experts import expert_layout
from engine.train import attention
from engine.train.deferred import DeferredWeights
from engine.train.distributed import ProcessGroup, RunForward
from engine.train.logprobs import CPU_BLOCK_ELEMENTS, chunked_logprobs
from engine.train.packing import Pack, pack_rows
from engine.train.routing import RouterReplay

if TYPE_CHECKING:
    from engine.tokens.vision import Vision


_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Maximum mean absolute difference of log-probs between the packed forward pass and the model's own."""
_SCALES = ("logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")
"""Keys of model configurations that scale logits."""


class PackedModel:
    """Computes log-probs of packs. Not thread-safe.

    The model stays in evaluation mode: the sampler has no dropout, so the log-probs compared with it must have none.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        autocast: torch.dtype | None = None,
        temperature: float = 1.0,
        vocab: int | None = None,
        vision: Vision | None = None,
        chunk_elements: int = 1 << 24,
        process_group: ProcessGroup | None = None,
        replay_experts: bool = False,
    ) -> None:
        """Load the model and check its packed forward pass. With several processes `shard` does both.

        Args:
            folder: Folder of the model's files.
            device: Device of the model.
            dtype: Dtype of the weights.
            autocast: Dtype of matrix products, if different.
            temperature: Divides the logits; 0 counts as 1, as in the sampler.
            vocab: Ids from this one on are never sampled. None: all ids can be sampled.
            vision: Image processing of the model; None for a text model.
            chunk_elements: Maximum size of a block of logits, tokens × vocabulary.
            process_group: The processes of the training. With more than one, the weights have no memory before `shard`.
            replay_experts: Use the experts of packs; see routing.py.

        Raises:
            TrainError: kind `train_setup`: not a causal model, experts cannot be replayed in it, or the packed pass
                differs from the model's own.
        """
        self.process_group = process_group or ProcessGroup()
        self._run: RunForward = lambda function, *args: function(*args)
        self._deferred: DeferredWeights | None = None
        self.folder, self.device, self.dtype = folder, device, dtype
        self.temperature = temperature or 1.0
        self.vision, self._autocast = vision, autocast
        on_cpu = device.type == "cpu" and not self.process_group.planned
        self.chunk_elements = min(chunk_elements, CPU_BLOCK_ELEMENTS) if on_cpu else chunk_elements
        if self.process_group.torch_group is not None:
            self._deferred = _load(folder, dtype, vision, DeferredWeights)
            self.model = self._deferred.model.eval()
        else:
            self.model = _load(folder, dtype, vision).to(device).eval()
        self._routers = RouterReplay(self.model)
        self.replays_experts = replay_experts
        """Whether the experts of packs are used."""
        head = self.model.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear):
            raise self._refusal("its output layer is not linear")
        self._head, self.hidden_size = head, head.in_features
        self.vocab = min(vocab or head.weight.shape[0], head.weight.shape[0])
        self.banned: tuple[int, ...] = tuple(vision.banned) if vision is not None else ()
        text = self.model.config.get_text_config()
        self._softcap: float | None = getattr(text, "final_logit_softcapping", None)
        self._scale = 1.0
        self._checks = False
        """Whether the packed forward pass is being checked, with the experts of the model's own pass."""
        if self._deferred is None:
            self._check_packed_forward()

    def shard(self, *, offload: bool = False) -> None:
        """Shard the weights over the processes, read this process's part, and check the packed forward pass.

        Every process must call this once, after adapters and heads were added and before an optimizer is made.

        Args:
            offload: Keep the weights, their gradients and the optimizer's state on the CPU (see `ProcessGroup.shard`).

        Raises:
            TrainError: kind `train_setup`: as `__init__`.
        """
        self._run = self.process_group.shard(self.model, offload=offload)
        if self.process_group.planned:
            attention.register()
            self._set_attention()
        elif self._deferred is not None:
            self._deferred.fill(self.process_group)
            self._deferred = None
            self._check_packed_forward()

    def autocast(self) -> AbstractContextManager[Any]:
        """A context in which matrix products use the autocast dtype."""
        return torch.autocast(self.device.type, self._autocast) if self._autocast is not None else nullcontext()

    def logprobs(
        self, pack: Pack, *, entropy: bool, states: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Log-probs [n] of the pack's trained tokens, entropies [n] or None, and with `states` what `states` returns.
        With a graph if gradients are enabled."""
        passed: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] = self._run(
            self._logprobs, pack, entropy, states
        )
        return passed

    def states(self, pack: Pack, head: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        """The hidden states before the pack's trained tokens, [n, H], or what `head` makes of them, such as a critic's
        values [n]. With a graph if gradients are enabled."""
        result: torch.Tensor = self._run(self._states_of, pack, head)
        return result

    def _states_of(self, pack: Pack, head: Callable[[torch.Tensor], torch.Tensor] | None) -> torch.Tensor:
        states = self._states(pack)[pack.sources.to(self.device)]
        return states if head is None else head(states)

    def _logprobs(
        self, pack: Pack, entropy: bool, with_states: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        states = self._states(pack)
        of_sources = states[pack.sources.to(self.device)] if with_states else None
        rows = self._head.weight.shape[0]
        if "once" not in pack.cache:  # the distinct pairs of source and label, and the index of each label's pair
            pairs = pack.sources * rows + pack.labels
            single, back = torch.unique(pairs, return_inverse=True)
            once = (single // rows, single % rows, back) if len(single) < len(pairs) else (pack.sources, pack.labels)
            pack.cache["once"] = [tensor.to(self.device) for tensor in once]
        sources, labels, *index = pack.cache["once"]
        with self.autocast():
            states = states[sources]
            if self._scale != 1.0:
                states = states * self._scale
            logprobs, entropies = chunked_logprobs(
                states,
                self._head.weight,
                labels,
                temperature=self.temperature,
                banned=self.banned,
                chunk_elements=self.chunk_elements,
                bias=self._head.bias,
                entropy=entropy,
                vocab=self.vocab,
                softcap=self._softcap,
            )
        if index:
            logprobs, entropies = logprobs[index[0]], None if entropies is None else entropies[index[0]]
        return logprobs, entropies, of_sources

    def _states(self, pack: Pack) -> torch.Tensor:
        """The hidden states that the output layer gets, [T, H]."""
        inputs: AbstractContextManager[dict[str, Any]]
        if self.vision is not None:
            inputs = vision_inputs(self.model, self.vision, pack, self.device, self.dtype)
        elif pack.images:
            raise TrainError("rows have images: pass the model's `vision`", kind="train_setup")
        else:
            inputs = nullcontext({"position_ids": pack.position_ids.to(self.device)[None]})
        with self.autocast(), inputs as named:
            given = pack.experts if self.replays_experts or self._checks else None
            self._routers.used = None if given is None else given.to(self.device)
            out = self.model.base_model(
                input_ids=pack.input_ids.to(self.device)[None], use_cache=False, pack=pack, **named
            )
        states: torch.Tensor = out.last_hidden_state[0]
        return states

    # --- check ----------------------------------------------------------------------------------------------

    def _refusal(self, why: str) -> TrainError:
        return TrainError(
            f"{type(self.model).__name__} ({self.folder}) cannot be trained: {why}; use a causal decoder with "
            "standard attention",
            kind="train_setup",
        )

    def _check_packed_forward(self) -> None:
        """Compare the packed pass over rows with a common prefix with the model's own pass over each row."""
        self._checks = self._routers.observes = True
        probes = self._probe()
        (pack,) = pack_rows(list(map(_row, probes)), 1 << 20, share_prefixes=True)
        with torch.no_grad():
            wanted, layer, experts = self._run(self._unpacked_logprobs, probes, pack)
            if experts:  # other choices of experts, near a tie, are no error of the packed pass
                (pack,) = pack_rows(list(map(_row, probes, experts)), 1 << 20, share_prefixes=True)
            attention.register()
            try:
                self._set_attention()
                logprobs, entropies, _ = self.logprobs(pack, entropy=True)
            except TrainError as error:
                raise self._refusal(str(error)) from error
            except (TypeError, ValueError, AttributeError, AssertionError, IndexError, KeyError, RuntimeError) as error:
                raise self._refusal(f"its packed pass fails: {type(error).__name__}: {error}") from error
            if self.replays_experts:
                self._check_replay(pack, logprobs)
        self._checks = self._routers.observes = False
        assert entropies is not None
        apart = float((torch.stack([logprobs, entropies]) - wanted).abs().mean())
        most = _TOLERANCE[self._autocast or self.dtype]
        if not layer <= most:
            raise self._refusal(
                f"its logits differ by {layer:.3g} from those of its output layer (the model changes them afterwards)"
            )
        if not apart <= most:
            raise self._refusal(
                f"its packed log-probs differ by {apart:.3g} from its own (its layers mix tokens in other ways than "
                "attention)"
            )

    def _check_replay(self, pack: Pack, found: torch.Tensor) -> None:
        """Check that experts can be replayed: others than those of the pack give other log-probs than `found` [n].

        Raises:
            TrainError: kind `train_setup`: they cannot.
        """
        problem = self._routers.problem()
        layout = expert_layout(self.model.config.to_dict())
        if problem is None and (layout is None or list(layout.sparse) != self._routers.layers):
            problem = f"its routers are in layers {self._routers.layers}, and its configuration says otherwise"
        if problem is None and layout is not None and layout.top_k < layout.experts:
            draw = np.random.default_rng(0).random((pack.tokens, layout.layers, layout.experts))
            drawn = torch.from_numpy(draw.argsort(-1)[..., : layout.top_k].astype(np.int32))
            if torch.equal(self.logprobs(replace(pack, experts=drawn), entropy=False)[0], found):
                problem = "its layers do not use the output of its routers"
        if problem is not None:
            raise TrainError(
                f"{type(self.model).__name__} ({self.folder}) cannot use the sampler's experts: {problem}. Remove "
                "`backend.routed_experts`, or use a trainer that carries them (docs/trainers.md)",
                kind="train_setup",
            )

    def _probe(self) -> list[np.ndarray]:
        """Sequences of ids with a common prefix, int64 [tokens] each."""
        draw = np.random.default_rng(0)
        ids = np.setdiff1d(np.arange(self.vocab), self.banned)
        begin = draw.choice(ids, 20)
        return [np.concatenate([begin, draw.choice(ids, more)]) for more in (9, 4, 6)]

    def _unpacked_logprobs(self, probes: list[np.ndarray], pack: Pack) -> tuple[torch.Tensor, float, list[np.ndarray]]:
        """Log-probs and entropies [2, n] of the model's own pass, how much its logits differ from its output layer's,
        and the experts of each sequence, [tokens, layers, top_k]; without experts none."""
        columns, off = [], 0.0
        experts: list[np.ndarray] = []
        allowed = torch.ones(self._head.weight.shape[0], dtype=torch.bool, device=self.device)
        allowed[self.vocab :] = False
        allowed[list(self.banned)] = False
        for probe in probes:
            ids = torch.tensor(probe, device=self.device)
            with self.autocast():
                out = self.model(input_ids=ids[None], use_cache=False, output_hidden_states=False)
                states = self.model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state
                off = max(off, self._find_scale(states, out.logits))
            chances = (out.logits[0].to(torch.promote_types(torch.float32, self.dtype)) / self.temperature)[:-1]
            chances = chances.masked_fill(~allowed, -torch.inf).log_softmax(-1)
            if self._routers.problem() is None:
                experts.append(self._routers.seen().numpy())
            picked = chances.gather(1, ids[1:, None])[:, 0]
            columns.append(torch.stack([picked, -(chances.exp() * chances.masked_fill(~allowed, 0.0)).sum(-1)]))
        return torch.cat(columns, 1), off, experts

    def _find_scale(self, states: torch.Tensor, logits: torch.Tensor) -> float:
        """Find the factor of the logits among those of the configuration. Returns the remaining mean absolute
        difference."""
        text = self.model.config.get_text_config()
        given = {name: float(getattr(text, name, None) or 1.0) for name in _SCALES}
        # Granite divides by `logits_scaling`, HyperCLOVA X multiplies by it.
        choices = {1.0, *given.values(), 1.0 / given["logits_scaling"]}
        off = {}
        for scale in choices:
            scaled = self._head(states * scale)
            if self._softcap is not None:
                scaled = self._softcap * torch.tanh(scaled / self._softcap)
            off[scale] = float((scaled - logits).abs().mean())
        self._scale = min(choices, key=lambda scale: off[scale])
        return off[self._scale]

    def _set_attention(self) -> None:
        name: Any = attention.ATTENTION
        config = self.model.config
        seeing = config.get_text_config() is not config
        self.model.set_attn_implementation({"text_config": name} if seeing else name)
        if config.get_text_config()._attn_implementation != name:
            raise TrainError("its attention cannot be replaced (transformers' AttentionInterface)", kind="train_setup")


def _row(probe: np.ndarray, experts: np.ndarray | None = None) -> TrainingRow:
    chosen = None if experts is None else experts.astype(expert_dtype(int(experts.max(initial=0)) + 1))
    return TrainingRow.of_tokens(probe, np.arange(len(probe)) > 0, routed_experts=chosen)


def _load(
    folder: Path, dtype: torch.dtype, vision: Vision | None, deferred: type[DeferredWeights] | None = None
) -> Any:
    """The model with its weights, or its `DeferredWeights`."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForCausalLM if vision is None else AutoModelForImageTextToText
    try:
        if deferred is not None:
            return deferred(folder, dtype, kind)
        with no_bars():
            return kind.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False)
    except (OSError, ValueError) as error:
        why = str(error).partition("\n")[0].partition(". ")[0]
        raise TrainError(
            f"{folder} holds no causal model with standard attention: {why}; use another one as `model.path`",
            kind="train_setup",
        ) from error


@contextmanager
def vision_inputs(
    model: Any, vision: Vision, pack: Pack, device: torch.device, dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """Position ids ([1, T], or [3, 1, T] for models with three), and the tensors of the pack's images, each once.

    A model asks its own `get_image_features` for the features of its input. In the block, that method returns those of
    the pack's positions: not all versions of transformers accept features as an input. The pack's `cache` stores the
    position ids.
    """
    inner = model.base_model
    if "positions" not in pack.cache:
        find = getattr(inner, "get_rope_index", None)
        positions = pack.position_ids if find is None else _positions(find, vision, pack, device)
        pack.cache["positions"] = positions.to(device).unsqueeze(-2)
    inputs: dict[str, Any] = {"position_ids": pack.cache["positions"]}
    if not pack.images:
        yield inputs
        return
    grids = {image.image: image.grid for image in pack.images}
    tensors = {name: torch.from_numpy(array) for name, array in vision.tensors([[digest] for digest in grids]).items()}
    moved = {name: tensor.to(device, dtype if tensor.is_floating_point() else None) for name, tensor in tensors.items()}
    features = inner.get_image_features(**moved, return_dict=True)
    places = {digest: place for place, digest in enumerate(grids)}
    _repeat(features, list(grids.values()), [places[image.image] for image in pack.images])
    inner.get_image_features = lambda *args, **kwargs: features
    try:
        yield inputs | {"pixel_values": torch.empty(0)}  # nobody reads it: with it, a model asks for features
    finally:
        del inner.get_image_features


def _repeat(features: Any, grids: Sequence[tuple[int, ...]], order: Sequence[int]) -> None:
    """Replace the features of distinct images, in the form of `get_image_features`, by those of `order`, which has
    indices of images."""
    pooled = features.pooler_output
    # One tensor for all images (transformers before 5.19) has Idefics3's tiles, and the whole image after them.
    sizes = [
        math.prod(grid) + 1 if isinstance(pooled, torch.Tensor) else len(pooled[at]) for at, grid in enumerate(grids)
    ]

    def repeated(values: Any) -> Any:
        if isinstance(values, torch.Tensor):
            parts = torch.split(values, sizes)
            return torch.cat([parts[index] for index in order])
        return [values[index] for index in order]

    features.pooler_output = repeated(pooled)
    if getattr(features, "deepstack_features", None) is not None:  # Qwen3-VL: features for several layers
        features.deepstack_features = [repeated(layer) for layer in features.deepstack_features]


def _positions(find: Any, vision: Vision, pack: Pack, device: torch.device) -> torch.Tensor:
    """Position ids, int64 [3, T]. They depend on earlier tokens only, so rows that share a token agree on its
    position."""
    positions = torch.zeros((3, pack.tokens), dtype=torch.long)
    starts = torch.tensor([image.start for image in pack.images], dtype=torch.long)
    grids = [torch.tensor([image.grid]) for image in pack.images]
    for number in range(len(pack.rows)):
        places = pack.row_tokens(number)
        ids = pack.input_ids[places]
        types = torch.tensor(vision.token_types([ids.tolist()]))
        mine = [grid for grid, inside in zip(grids, torch.isin(starts, places).tolist(), strict=True) if inside]
        grid = torch.cat(mine).to(device) if mine else None
        row = find(input_ids=ids[None].to(device), mm_token_type_ids=types.to(device), image_grid_thw=grid)[0]
        positions[:, places] = row[:, 0].cpu()
    return positions
