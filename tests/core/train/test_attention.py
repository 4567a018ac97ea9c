from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from examples import examples
from hypothesis import given, settings
from nets_for_tests import build, make_row, plain, widen_norms
from slow_cases import slow_after

from engine.errors import TrainError
from engine.store.rows.row import TrainingRow
from engine.train import attention
from engine.train.packed_model import PackedModel
from engine.train.packing import pack_rows

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {},
}


def open_net(folder: Path, **more: Any) -> PackedModel:
    settings: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float64} | more
    return PackedModel(folder, **settings)


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[PackedModel, Any]]:
    """Each family as a packed net, and as transformers loads it."""
    from transformers import AutoModelForCausalLM

    found = {}
    for family, changes in FAMILIES.items():
        folder = build(family, tmp_path_factory.mktemp(family), **changes)
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
        found[family] = (open_net(folder, temperature=0.8, vocab=38), widen_norms(reference.eval()))
        widen_norms(found[family][0].model)
    return found


def open_both(folder: Path) -> tuple[PackedModel, Any]:
    """A packed net, and the same model as transformers runs it."""
    net, reference = open_net(folder), open_net(folder).model
    reference.set_attn_implementation("sdpa")
    return net, reference


def same_as_alone(
    net: PackedModel,
    reference: Any,
    rows: list[TrainingRow],
    max_tokens_per_microbatch: int = 1000,
    min_shared_tokens: int = 1,
    close: float = 1e-9,
    **more: Any,
) -> None:
    """Log-probs, entropies and the gradients of all weights equal those of one plain pass a row."""
    wanted = plain(reference, rows, **more)
    weigh = torch.linspace(-1, 2, len(wanted[0]), dtype=torch.float64)
    loss = (wanted[0] * weigh).sum() + (wanted[1] * weigh.flip(0)).sum()
    gradients = dict(zip(_names(reference), torch.autograd.grad(loss, list(reference.parameters())), strict=True))
    found = torch.zeros_like(wanted[0]), torch.zeros_like(wanted[1])
    net.model.zero_grad()
    counts = [int(row.loss_mask().sum()) for row in rows]
    for pack in pack_rows(rows, max_tokens_per_microbatch, share_prefixes=True, min_shared_tokens=min_shared_tokens):
        logprobs, entropies, _ = net.logprobs(pack, entropy=True)
        assert entropies is not None
        here = torch.cat([torch.arange(counts[row]) + sum(counts[:row]) for row in pack.rows])
        found[0][here], found[1][here] = logprobs.detach(), entropies.detach()
        ((logprobs * weigh[here]).sum() + (entropies * weigh.flip(0)[here]).sum()).backward()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=close)
    for name, parameter in net.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=close, atol=close)


def _names(model: Any) -> list[str]:
    return [name for name, _ in model.named_parameters()]


BEGIN = [3, 1, 4, 1, 5, 9, 2, 6]
TREE = [
    [*BEGIN, 5, 3, 5],
    [*BEGIN, 8, 9, 7, 9, 3, 2],
    [*BEGIN, 8, 9, 7, 1, 1],
    [*BEGIN, 8, 9, 7, 9],
    [2, 7, 1, 8, 2, 8],
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parts", [True, False])
def test_a_pack_computes_each_row_as_if_it_were_alone(
    nets: Any, family: str, parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not parts:  # as on other devices
        monkeypatch.setattr(
            attention._Parts, "apply", lambda q, k, v, segments, scale: attention._paths(q, k, v, pack, None, scale)
        )
        (pack,) = pack_rows([make_row(ids) for ids in TREE], 1000, share_prefixes=True, min_shared_tokens=1)
    net, reference = nets[family]
    same_as_alone(net, reference, [make_row(ids) for ids in TREE], temperature=0.8, vocab=38)


ids_strategy = st.lists(st.lists(st.integers(1, 2), min_size=2, max_size=12), min_size=1, max_size=6)


@settings(max_examples=examples(25), deadline=None)
@given(ids_strategy, st.sampled_from(list(FAMILIES)), st.integers(1, 5), st.sampled_from([5, 20, 1000]))
def test_random_tries(
    nets: Any, raw: list[list[int]], family: str, min_shared_tokens: int, max_tokens_per_microbatch: int
) -> None:
    rows = [make_row(ids) for ids in raw]
    net, reference = nets[family]
    same_as_alone(net, reference, rows, max_tokens_per_microbatch, min_shared_tokens, temperature=0.8, vocab=38)


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    from engine.train.policy import enable_gradient_checkpointing

    folder = build("Qwen2", tmp_path)
    net, reference = open_both(folder)
    widen_norms(net.model)
    widen_norms(reference)
    enable_gradient_checkpointing(net.model)
    again: list[int] = []
    layer = net.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: again.append(1))
    same_as_alone(net, reference, [make_row(ids) for ids in TREE])
    layer.remove()
    assert len(again) == 2  # forward, and once more on the way back


@pytest.mark.parametrize("window", slow_after(1, [3, 6, 40]))
def test_sliding_windows_are_kept(tmp_path: Path, window: int) -> None:
    folder = build(
        "Qwen2",
        tmp_path,
        use_sliding_window=True,
        sliding_window=window,
        layer_types=["full_attention", "sliding_attention"],
    )
    net, reference = open_both(folder)
    widen_norms(net.model)
    widen_norms(reference)
    same_as_alone(net, reference, [make_row(ids) for ids in TREE])


@pytest.mark.parametrize(
    ("family", "changes"),
    slow_after(
        1,
        [
            ("Gemma3Text", {"final_logit_softcapping": 3.0, "sliding_window": 4, "query_pre_attn_scalar": 8}),
            ("Granite", {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "attention_multiplier": 0.2}),
            ("Cohere", {"logit_scale": 0.25}),
            ("Olmo2", {}),
            ("Phi3", {"attention_dropout": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}),
        ],
        several=True,
    ),
)
def test_what_families_do_to_logits_and_attention(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    name = family.removesuffix("Text")
    if name != family:
        import transformers

        folder = _save(transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig, tmp_path, changes)
    else:
        folder = build(family, tmp_path, **changes)
    # Their norms, and Gemma's attention, are float32 whatever the weights are.
    same_as_alone(*open_both(folder), [make_row(ids) for ids in TREE], close=1e-4)


def _save(model: Any, config: Any, folder: Path, changes: dict[str, Any]) -> Path:
    from nets_for_tests import _TEXT

    torch.manual_seed(1)
    model(config(**_TEXT | changes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("Gemma2", {"sliding_window": 16, "query_pre_attn_scalar": 8}, "does not support"),
        ("Mamba", {"state_size": 4}, "does not support"),
        ("Falcon", {"head_dim": ...}, "its attention cannot be replaced"),
        (
            "Lfm2",
            {"layer_types": ["conv", "full_attention"], "block_ff_dim": 24},
            "packed log-probs differ by .* from its own",
        ),
    ],
)
def test_other_architectures_are_refused_and_told_why(
    tmp_path: Path, family: str, changes: dict[str, Any], why: str
) -> None:
    folder = build(family, tmp_path, **changes)
    with pytest.raises(TrainError, match=why) as caught:
        open_net(folder)
    assert f"{family}ForCausalLM" in str(caught.value)
    assert caught.value.kind == "train_setup"


def test_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="holds no causal model"):
        open_net(tmp_path)
