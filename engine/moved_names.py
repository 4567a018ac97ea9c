"""Public modules that moved. Importing an old one is an error that names the new one; entry points are read through
this table.

Only the standard library is imported here, because `engine/__init__.py` imports this module.
"""

from __future__ import annotations

MOVED: dict[str, str] = {
    "engine.actions.base": "engine.actions.action",
    "engine.actions.workers": "engine.actions.calling.workers",
    "engine.backends.anthropic": "engine.plugins.chat_apis.anthropic",
    "engine.backends.api": "engine.plugins.chat_apis.backend",
    "engine.backends.budget": "engine.plugins.chat_apis.budget",
    "engine.backends.http": "engine.plugins.servers.http",
    "engine.backends.http.outage": "engine.backends.outage",
    "engine.backends.launch": "engine.plugins.launch",
    "engine.backends.servers": "engine.plugins.servers",
    "engine.backends.openai": "engine.plugins.chat_apis.openai",
    "engine.backends.sglang": "engine.plugins.sglang",
    "engine.backends.vllm": "engine.plugins.vllm",
    "engine.checks": "engine.validate",
    "engine.cli.audit": "engine.plugins.audit.command",
    "engine.cli.console": "engine.console",
    "engine.cli.export:ExportFormat": "engine.api.exports:ExportFormat",
    "engine.cli.validate.examine": "engine.validate.examine",
    "engine.cli.validate.report:Report": "engine.validate.report:Report",
    "engine.cli.validate_examine": "engine.validate.examine",
    "engine.client": "engine.plugins.serve.client",
    "engine.doctor": "engine.plugins.doctor",
    "engine.episode:Episode": "engine.episode.episode:Episode",
    "engine.integrations.audit": "engine.plugins.audit",
    "engine.integrations.datasets": "engine.plugins.datasets",
    "engine.integrations.environments": "engine.plugins.adapters",
    "engine.integrations.environments.harbor": "engine.plugins.harbor.environment",
    "engine.integrations.environments.verl": "engine.plugins.adapters.verl.tools",
    "engine.integrations.trainers": "engine.plugins.trainers",
    "engine.integrations.trainers.verl.tasks": "engine.plugins.trainers.verl.manager",
    "engine.integrations.verl": "engine.plugins.adapters.verl.interactions",
    "engine.integrations.verl_config": "engine.plugins.adapters.verl.config",
    "engine.integrations.verl_modules": "engine.plugins.adapters.verl.modules",
    "engine.isolation.sandbox": "engine.plugins.confinement.sandbox",
    "engine.limit": "engine.schemas.limits",
    "engine.machine.draw": "engine.plugins.pictures.draw",
    "engine.machine.layout": "engine.plugins.pictures.draw",
    "engine.notices": "engine.plugins.notices",
    "engine.scenarios": "engine.plugins.scenarios",
    "engine.plugins.trainers.verl.tasks": "engine.plugins.trainers.verl.manager",
    "engine.schemas.adapters": "engine.schemas.entry",
    "engine.schemas.agent": "engine.plugins.agents.spec",
    "engine.schemas.backend:LocalBackendSpec": "engine.plugins.local.spec:LocalBackendSpec",
    "engine.schemas.backend:SGLangBackendSpec": "engine.plugins.sglang.spec:SGLangBackendSpec",
    "engine.schemas.backend_api": "engine.plugins.chat_apis.spec",
    "engine.schemas.backend_base": "engine.schemas.backend",
    "engine.schemas.condense": "engine.plugins.condense.spec",
    "engine.schemas.critic": "engine.schemas.train",
    "engine.schemas.notify": "engine.plugins.notices.spec",
    "engine.schemas.plan": "engine.plugins.plan.spec",
    "engine.schemas.scenario": "engine.plugins.scenarios.schema",
    "engine.schemas.task_sources": "engine.schemas.tasks",
    "engine.schemas.tasks:SlimeRows": "engine.plugins.adapters.row_presets:SlimeRows",
    "engine.schemas.tasks:VerlRows": "engine.plugins.adapters.row_presets:VerlRows",
    "engine.schemas.traces": "engine.plugins.traces.spec",
    "engine.schemas.train:TrackingSpec": "engine.plugins.report.spec:TrackingSpec",
    "engine.schemas.train_kinds": "engine.schemas.train",
    "engine.spec.diagnostic": "engine.spec.text.diagnostic",
    "engine.store.export": "engine.store.rows.export",
    "engine.store.parquet": "engine.store.rows.export",
    "engine.traces": "engine.plugins.traces",
    "engine.train.folder": "engine.store.training",
    "engine.train.changes": "engine.train.setup",
    "engine.train.loss_weights": "engine.train.loss_columns",
    "engine.train.losses.base": "engine.train.losses.formulas",
    "engine.train.losses.objective": "engine.train.losses",
    "engine.train.plan": "engine.plugins.plan.plan",
    "engine.train.sinks": "engine.plugins.report.trackers",
    "engine.train.tokens": "engine.train.loss_tokens",
    "engine.train.tokens:Tokens": "engine.train.loss_tokens:LossTokens",
    "engine.tokens.tiny_lm": "engine.plugins.local.tiny_lm",
    "engine.tokens.tiny_vlm": "engine.plugins.local.tiny_vlm",
    "engine.view": "engine.plugins.view",
    "engine.view.advantages": "engine.plugins.show.listing.tokens",
    "engine.view.compare": "engine.plugins.compare.run_comparison",
    "engine.view.episode": "engine.plugins.show.listing.episode",
    "engine.view.filters": "engine.plugins.show.listing.filters",
    "engine.view.heads": "engine.plugins.show.listing.heads",
    "engine.view.listing": "engine.plugins.show.listing.listing",
    "engine.view.logs": "engine.plugins.show.listing.training",
    "engine.view.rows": "engine.plugins.show.listing.rows",
    "engine.view.sources": "engine.plugins.show.listing.sources",
    "engine.view.texts": "engine.plugins.show.listing.tokens",
    "engine.view.tokens": "engine.plugins.show.listing.tokens",
    "engine.view.training": "engine.plugins.show.listing.training",
    "engine.view.unfinished": "engine.plugins.show.listing.episode",
}
"""Old -> new: a module, or a package with all that is in it; `module:object` for one object."""


def new_module(name: str) -> str | None:
    """The new name of a module; None if it did not move."""
    parent, rest = name, ""
    while parent:
        if parent in MOVED:
            return MOVED[parent] + rest
        parent, _, last = parent.rpartition(".")
        rest = f".{last}{rest}"
    return None


def new_name(use: str) -> str | None:
    """The new name of an entry point, `module:object`; None if it did not move."""
    module, colon, name = use.partition(":")
    if use in MOVED or (new := new_module(module)) is None:
        return MOVED.get(use)
    return f"{new}{colon}{name}"


class MovedNameWarning(FutureWarning):
    """An entry point has an old name."""


def current(use: str) -> str:
    """An entry point, `module:object`, as it is named now. Warns where it moved."""
    new = new_name(use)
    if new is None:
        return use
    import warnings

    warnings.warn(f"`{use}` is `{new}` now; write the new name", MovedNameWarning, stacklevel=2)
    return new


def find_spec(name: str, path: object = None, target: object = None) -> None:
    """This module is the last finder of `sys.meta_path`. It answers only for modules of `MOVED` and for packages that
    only had such modules. Raises: ModuleNotFoundError: the module moved."""
    if not name.startswith("engine."):
        return
    parts = ", ".join(f"`{old}` is `{new}`" for old, new in MOVED.items() if old.startswith(f"{name}."))
    if (new := new_module(name)) is not None:
        raise ModuleNotFoundError(f"`{name}` is `{new}` now" + (f"; {parts}" if parts else ""), name=name)
    if parts:
        raise ModuleNotFoundError(f"there is no `{name}`; of what was in it, {parts} now", name=name)
