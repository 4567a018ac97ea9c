"""EpisodeSpec: the YAML document that declares an episode."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter, field_validator, model_validator

from engine.schemas.base import Bytes, Contract, Seconds
from engine.schemas.generation import SamplingParams
from engine.schemas.message import ContentPart
from engine.schemas.reward import RewardEvent, TurnAddress
from engine.schemas.train import TrainSpec

Effects = Literal["pure", "replayable", "external"]
"""What a crash may do with a call that was made already.

`pure`: nothing; its recorded answer is enough. `replayable`: it is called again to rebuild its state,
and must answer the same. `external`: it cannot be called again, so the episode starts anew.
"""

DEFAULT_MALFORMED = "Your tool call could not be read: {{problem}} No tool was called. Write the call again in the format that you were given."


Words = str | list[ContentPart]
"""What is said to the model: a text, or text and image parts. `{{field}}` is filled in, in texts and image references."""


class Entry(Contract):
    """Something of the user's own, by entry point."""

    use: str = Field(min_length=1)
    """`package.module:Name`."""
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")
    """Keyword arguments for its constructor."""


class IsolationSpec(Contract):
    """Where code of the spec runs, and what it may use there. A key that is left out is the spec's `isolation`'s."""

    mode: Literal["thread", "process"] | None = None
    """`thread`: in the engine's process. `process`: each object in a worker process, which is killed at a deadline."""
    memory: Bytes | None = None
    """Most memory of one worker process; 4GB when left out."""
    cpu: Seconds | None = None
    """Most CPU time of one call; its deadline alone when left out."""
    output: Bytes | None = None
    """Most bytes that one call may print, and most bytes of its answer; 16MB when left out."""
    processes: int | None = Field(default=None, ge=1)
    """Most processes and threads of one worker, itself included; 256 where the engine runs as root, no limit elsewhere."""
    workers: int | None = Field(default=None, ge=1)
    """Most worker processes at once: others wait. Left out: 64 for functions, one for each object of a live episode."""
    user: str | None = Field(default=None, min_length=1)
    """The system user of the workers, where the engine runs as root; `engine` is the engine's own. Left out: an
    unprivileged uid for each worker."""

    @property
    def limits(self) -> dict[str, int | float | str]:
        """What is set beside `mode`."""
        values = {name: getattr(self, name) for name in type(self).model_fields if name != "mode"}
        return {name: value for name, value in values.items() if value is not None}

    def over(self, default: IsolationSpec | None) -> IsolationSpec:
        """This one, with what it leaves out taken from `default`."""
        if default is None or self.mode == "thread":
            return self
        missing = [name for name in type(self).model_fields if getattr(self, name) is None]
        return self.model_copy(update={name: getattr(default, name) for name in missing})

    @model_validator(mode="before")
    @classmethod
    def _by_mode(cls, value: Any) -> Any:
        return {"mode": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _limits_bind(self) -> IsolationSpec:
        if self.mode == "thread" and self.limits:
            named = " and ".join(f"`{name}`" for name in self.limits)
            raise ValueError(f"{named} cannot limit code in a thread of the engine's process; write `mode: process`")
        return self


class ModelSpec(Contract):
    """Which model speaks, and how conversations become its tokens."""

    path: str = Field(min_length=1)
    """A folder, a hub id, or a name in the catalogue (`engine models` lists it)."""
    revision: str | None = None
    """Hub revision, where `path` is a hub id."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; the model's own when left out."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's chat template. Relative to the spec."""
    renderer: str = "auto"
    """`auto` or `template`: the model's own chat template renders; or the name of a family in the library `renderers`, which then renders in its place."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Handed to the chat template (`enable_thinking: false`, say)."""
    history: Literal["branch", "keep"] = "branch"
    """Where the template rewrites history (drops old reasoning, say): begin a new exact branch, or keep what was sampled."""
    tool_calls: str = "auto"
    """How calls are written: `auto` (as the chat template writes them, read by what is proved to read them), `hermes`, `plain` (`name(arg=1)` in call tags), `pythonic` (LFM2's), or `package.module:Parser`."""
    tool_role: Literal["tool", "user"] = "tool"
    """The role that tool results are shown under, for templates without a tool role."""
    allow_special: bool = False
    """Whether text of users, tools, environments, task fields and replies that spells a special or other added token (`<|im_end|>`,
    `<think>`) becomes that token. Left out, it is encoded as plain text; the spec's own prompts and the chat template always may."""
    context: int | None = Field(default=None, gt=0)
    """Most tokens that the model can attend to; read from its config when left out."""
    max_images: int | None = Field(default=None, ge=1)
    """Most images that the model takes in one conversation; one more fails the episode."""
    max_image_pixels: int = Field(default=33_554_432, ge=1)
    """Most pixels of one image as it comes; a larger one fails the episode. The model's processor scales those below it."""


class LocalBackendSpec(Contract):
    """transformers in this process, with batching of concurrent requests."""

    kind: Literal["local"] = "local"
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: float32 on a CPU, bfloat16 on a GPU. In 16 bits log-probs differ from a recomputation, by up to 0.5."""
    deterministic: bool = False
    """A reply's ids and log-probs are bit-identical in any batch, and after a restart. About half as fast
    in full batches; proved for the model and machine at the start, or refused."""
    max_batch: int = Field(default=32, ge=1)
    """Most sequences in one forward pass."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads for torch; its own choice when left out."""


class SGLangBackendSpec(Contract):
    """SGLang servers, over their native HTTP API."""

    kind: Literal["sglang"] = "sglang"
    urls: list[str] = Field(min_length=1)
    """One for each server, such as `http://127.0.0.1:30000`."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key."""
    router: bool = False
    """The URL is an sglang-router; what it drops is checked at the start."""
    timeout: Seconds = 600.0
    """Deadline for one reply, tries and all. Time in which no server can be asked does not count."""
    try_timeout: Seconds | None = None
    """Deadline for one try, after which the reply is asked for again, elsewhere if possible; half of `timeout` when left out."""
    retries: int = Field(default=4, ge=0)
    """Tries after the first, on broken connections, bad replies and 5xx. A server that cannot be reached or answers 429,
    502, 503 or 504 uses up no try."""
    wait: Seconds = 600.0
    """How long a run waits while no server replies; then it stops, and can be resumed. No episode fails for an outage."""
    adapter: str | None = None
    """Name of a LoRA adapter that is loaded in the servers; left out, the base model samples."""
    health_timeout: Seconds = 30.0
    """A server that has requests and says nothing for so long is asked whether it is there."""
    interrupted: Literal["resume", "report"] = "resume"
    """A reply that the server cuts short (its weights are updated): sample the rest, or hand it on as aborted."""
    verify: bool = False
    """Load the model here, at the start, and compare one prompt's log-probs (with an image, for a model that takes some) with
    each server's."""


class OpenAIBackendSpec(Contract):
    """Any OpenAI-compatible chat endpoint: text alone, so its rows do not train."""

    kind: Literal["openai"] = "openai"
    url: str
    """Base URL, up to and including `/v1`."""
    model: str
    api_key_env: str | None = None
    timeout: Seconds = 600.0
    """Deadline for one reply, tries and all. Time in which the endpoint cannot be asked does not count."""
    try_timeout: Seconds | None = None
    """Deadline for one try, after which the reply is asked for again; half of `timeout` when left out."""
    retries: int = Field(default=4, ge=0)
    """Tries after the first, on broken connections, bad replies and 5xx. An endpoint that cannot be reached or answers 429,
    502, 503 or 504 uses up no try."""
    wait: Seconds = 600.0
    """How long a run waits while the endpoint does not reply; then it stops, and can be resumed. No episode fails for an
    outage."""


class ScriptedBackendSpec(Contract):
    """Replies from a YAML file, tokenised by the real tokenizer: a dry run without a model."""

    kind: Literal["scripted"] = "scripted"
    replies: str | list[Any]
    """A YAML file (relative to the spec), or the replies themselves."""
    latency: Annotated[float, Field(ge=0)] = 0.0
    """Seconds before each reply."""


BackendSpec = Annotated[
    LocalBackendSpec | SGLangBackendSpec | OpenAIBackendSpec | ScriptedBackendSpec, Field(discriminator="kind")
]


class PromptMessage(Contract):
    """One message of every episode's beginning. `{{field}}` is the task's field."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Words
    """Text, or a list of text and image parts; an image's path is relative to the spec."""


class TasksSpec(Contract):
    """Where tasks come from."""

    source: Literal["inline", "jsonl", "parquet", "hub", "python"]
    rows: list[dict[str, Any]] | None = None
    """For `inline`: the rows."""
    path: str | None = None
    """For `jsonl` and `parquet`: the file, relative to the spec. For `hub`: the data set's id."""
    name: str | None = None
    """For `hub`: the configuration."""
    split: str = "train"
    """For `hub`: the split."""
    use: str | None = None
    """For `python`: `package.module:callable` that returns an iterable of rows."""
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")
    """For `python`: its keyword arguments."""
    map: dict[str, str] = Field(default_factory=dict)
    """Field of the task -> field of the row; every field of the row when left out."""
    id: str | None = None
    """The row's field that names the task; its position when left out."""
    user: str | None = None
    """The row's field that names the task's user, of `users`."""
    limit: int | None = Field(default=None, ge=1)
    """The first so many rows."""

    @model_validator(mode="after")
    def _complete(self) -> TasksSpec:
        need = {"inline": "rows", "jsonl": "path", "parquet": "path", "hub": "path", "python": "use"}[self.source]
        if getattr(self, need) is None:
            raise ValueError(f"`source: {self.source}` needs `{need}`")
        return self


class EnvironmentSpec(Entry):
    """The environment of each episode."""

    effects: Effects = "replayable"
    timeout: Seconds = 60.0
    """Deadline for each of its calls."""
    isolation: IsolationSpec | None = None
    """Where it runs; the spec's `isolation` when left out."""


class ToolSpec(Entry):
    """One tool: a typed function, or a class that is built with `with` and then called."""

    name: str | None = None
    """Its name for the model; the function's own when left out."""
    timeout: Seconds | None = None
    """Deadline for one call; `limits.tool_seconds` when left out."""
    effects: Effects = "pure"
    isolation: IsolationSpec | None = None
    """Where it runs; the spec's `isolation` when left out."""


class ToldMessage(Contract):
    """One message of what a model that plays a part is told. `{{field}}` is filled in."""

    role: Literal["system", "user", "assistant"]
    content: str


class PlayedSpec(Contract):
    """Something of the user's own by entry point, or a model that plays its part."""

    use: str | None = Field(default=None, min_length=1)
    """`package.module:Name`; left out where a model plays the part."""
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")
    """Beside `use`: keyword arguments for its constructor."""
    timeout: Seconds | None = None
    """Deadline for one answer: 1m beside `use`, 10m for a model's, when left out."""
    model: ModelSpec | None = None
    """Which model plays, and how conversations become its tokens; the policy's own when left out."""
    backend: BackendSpec | None = None
    """Where it runs. Left out: in the policy's backend, where the weights are the same; else transformers in this process."""
    sampling: SamplingParams = Field(default_factory=SamplingParams)
    """How it is sampled. Nothing that it says is ever trained."""
    prompt: list[ToldMessage] = Field(default_factory=list)
    """What the model that plays is told. `{{task.question}}` is a field of the task; `{{reply}}` the policy's newest reply."""
    turn_tokens: int = Field(default=512, ge=1)
    """Most tokens of one answer that a model gives, its reasoning included."""
    isolation: IsolationSpec | None = None
    """Where the code of `use`, or of a model's `grader`, runs; the spec's `isolation` when left out."""

    @property
    def played(self) -> bool:
        """Whether a model plays the part."""
        return self.use is None

    @property
    def seconds(self) -> float:
        """Deadline for one answer, in seconds."""
        return self.timeout or (600.0 if self.played else 60.0)

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        """By entry point or played: never both, and no key of the one beside the other."""
        if self.use is None:
            if not self.prompt:
                raise ValueError(
                    "it needs `use` (an entry point), or `prompt` (what a model that plays the part is told)"
                )
            if self.with_:
                raise ValueError("`with` belongs to `use`; a model that plays the part takes none")
            return self
        apart = {"use", "with_", "timeout", "effects", "isolation"}
        # A stored spec says every default: what is as it would be anyway is not stray.
        stray = [
            name
            for name, info in type(self).model_fields.items()
            if name in self.model_fields_set - apart
            and getattr(self, name) != info.get_default(call_default_factory=True, validated_data={})
        ]
        if stray:
            named = " and ".join(f"`{name}`" for name in stray)
            raise ValueError(
                f"{named} {'is' if len(stray) == 1 else 'are'} for a part that a model plays; this one has `use`"
            )
        return self


class Mark(Contract):
    """Something that a model-played user writes for the engine's eyes: it is taken out of what the policy is shown."""

    text: str | None = Field(default=None, min_length=1)
    """This text, wherever it stands."""
    pattern: str | None = Field(default=None, min_length=1)
    """Or what this regular expression finds."""
    satisfied: bool = False
    """Then the user wants nothing more."""
    solved: bool = False
    """Then the task is solved."""
    rewards: list[RewardEvent] = Field(default_factory=list)
    """Then these are written."""
    reward: str | None = Field(default=None, min_length=1)
    """Then the number in the pattern's first group is written as a reward of this name."""
    facts: dict[str, Any] = Field(default_factory=dict)
    """Then guards read these as `feedback.<name>` and `facts.<name>`."""

    @model_validator(mode="after")
    def _whole(self) -> Mark:
        if (self.text is None) == (self.pattern is None):
            raise ValueError("a mark needs exactly one of `text` and `pattern`")
        groups = _groups(self.pattern) if self.pattern is not None else 0
        if self.reward is not None and not groups:
            raise ValueError("`reward` needs a `pattern` with a group, such as `SCORE=([0-9.]+)`")
        return self


def _groups(pattern: str) -> int:
    """How many groups a regular expression has."""
    try:
        return re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"the pattern is no regular expression: {error}") from error


class PlayedLimits(Contract):
    """What a user that a model plays may cost in one episode, beside `limits` of the spec. Time is its `timeout`."""

    turns: int | None = Field(default=None, ge=1)
    """Answers."""
    tokens: int | None = Field(default=None, ge=1)
    """Tokens that it may sample; checked before each answer."""


class UserSpec(PlayedSpec):
    """The simulated user: `use` names a class of one's own, `prompt` has a model play it."""

    effects: Effects = "pure"
    opener: str = "Hello. How can I help you?"
    """What the policy is taken to have said first, where the dialogue follows the prompt with its roles changed over."""
    marks: list[Mark] = Field(default_factory=list)
    """What the model writes to end the conversation, call the task solved, or give rewards."""
    limits: PlayedLimits = Field(default_factory=PlayedLimits)
    """The model's own limits."""
    grader: Entry | None = None
    """A user by entry point that judges first: its rewards, facts, `solved` and `satisfied` stand, and the model only
    finds the words. Its own words are `{{verdict}}` in the prompt."""


class ScorerSpec(PlayedSpec):
    """The last word on an episode's rewards: a function, or a model as judge. Both read assistant messages alone."""

    use: str | None = Field(default=None, min_length=1)
    """`math-verify`, or `package.module:callable(view) -> list[RewardEvent]`; left out where a model judges."""
    name: str = Field(default="judge", min_length=1)
    """Of the judge's reward."""
    pattern: str = Field(default=r"(?i)\bscore\W*(-?\d+(?:\.\d+)?)", min_length=1)
    """Regular expression whose first group is the judge's number, where it stands last in the reply."""
    scale: list[float] = Field(default_factory=lambda: [0.0, 1.0], min_length=2, max_length=2)
    """What the judge's numbers run from and to; the reward runs from 0 to 1."""
    turns: Literal["last", "each"] = "last"
    """Whether the episode's last reply is judged, or each of them."""
    tries: int = Field(default=2, ge=1)
    """Replies of the judge that may be asked for until one has a number on the scale."""

    @model_validator(mode="after")
    def _readable(self) -> ScorerSpec:
        if not _groups(self.pattern):
            raise ValueError(r"`pattern` needs a group that holds the number, such as `Score: (\d+)`")
        if not self.scale[0] < self.scale[1]:
            raise ValueError("`scale` runs from a lower to a higher number, such as [0, 10]")
        return self


class StateSpec(Contract):
    """One state: what is done in it."""

    action: str | None = None
    """`reset`, `generate`, `call_tools`, `ask_user`, `step`, `score`, or `package.module:action` of your own."""
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")
    """For an action of your own: its keyword arguments."""
    final: bool = False
    """The episode ends here."""
    timeout: Seconds | None = None
    """Deadline for an action of your own."""


class TransitionSpec(Contract):
    """Where an event leads. Of several for one (source, trigger), the first whose condition holds is taken."""

    trigger: str | list[str]
    """The event, or several."""
    source: str | list[str]
    """The state, or several; `"*"` is every state that is not final."""
    dest: str
    conditions: str | None = None
    """One CEL expression; left out, the transition is always taken."""

    @property
    def triggers(self) -> list[str]:
        """The events, as a list."""
        return [self.trigger] if isinstance(self.trigger, str) else list(self.trigger)

    @property
    def sources(self) -> list[str]:
        """The states, as a list."""
        return [self.source] if isinstance(self.source, str) else list(self.source)


Preset = Literal["single_turn", "tools", "tools_and_user", "retry_with_feedback"]


class MachineSpec(Contract):
    """The state machine: a preset, a preset with changes, or one's own."""

    preset: Preset | None = None
    """Begin with this one; the states below are added, and the transitions below are tried first."""
    initial: str | None = Field(default=None, min_length=1)
    """The first state; the preset's when left out."""
    states: dict[str, StateSpec] = Field(default_factory=dict)
    transitions: list[TransitionSpec] = Field(default_factory=list)

    @model_validator(mode="after")
    def _complete(self) -> MachineSpec:
        if self.preset is None and (not self.states or self.initial is None):
            raise ValueError("a machine needs `preset`, or both `initial` and `states`")
        return self


class LimitsSpec(Contract):
    """What one episode may cost. Checked before each action, in the order of these fields."""

    episode_seconds: Seconds | None = 600.0
    """Wall time of the whole episode."""
    assistant_turns: int | None = Field(default=8, ge=1)
    """Turns that the model may take."""
    images: int | None = Field(default=None, ge=1)
    """Images that the conversation may hold when the model is asked."""
    episode_tokens: int | None = Field(default=None, ge=1)
    """Tokens of the current branch: prompt, replies, and the closing tokens and messages between them. A reply is cut at
    exactly this length. The model's context when left out."""
    turn_tokens: int = Field(default=512, ge=1)
    """Tokens that the model may sample in one turn."""
    tool_calls: int | None = Field(default=16, ge=1)
    """Calls of tools. Calls beyond it inside one turn are answered with an error."""
    user_turns: int | None = Field(default=8, ge=1)
    """Answers of the user."""
    tool_seconds: Seconds = 30.0
    """Deadline for one tool call."""


class ReassignRule(Contract):
    """A rule that moves or writes rewards when a state has done its work."""

    at: str = Field(min_length=1)
    """The state after whose action the rule is tried."""
    when: str | None = None
    """One CEL expression; left out, the rule always applies."""
    op: Literal["add", "set", "transfer"] = "transfer"
    name: str | None = None
    """Which reward; see `RewardEvent.name`."""
    from_: TurnAddress | None = Field(default=None, alias="from")
    """For a transfer: the turn that pays."""
    to: TurnAddress = "last"
    """The turn that receives, or that is written."""
    share: float | None = Field(default=None, ge=0.0, le=1.0)
    """For a transfer: the part of what `from` holds that moves."""
    value: float | None = None
    """For add and set, the amount; for a transfer, instead of `share`."""
    discount: float = Field(default=1.0, ge=0.0)
    """For `each`: the factor per turn of distance from the last turn."""
    cause: str = ""
    """Shown beside the reward; the rule's position when left out."""

    @model_validator(mode="after")
    def _whole(self) -> ReassignRule:
        if self.op == "transfer":
            if self.from_ is None:
                raise ValueError("a transfer needs `from`: the turn that pays")
            if (self.value is None) == (self.share is None):
                raise ValueError("a transfer needs exactly one of `share` and `value`")
        else:
            if self.value is None:
                raise ValueError(f"`op: {self.op}` needs a `value`")
            if self.from_ is not None or self.share is not None:
                raise ValueError(f"`from` and `share` belong to `op: transfer`, not to `{self.op}`")
        return self


class ComparedCredit(Contract):
    """What methods share that compare an episode with its group."""

    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    """What is taken off: the group's mean, the mean of the others, or nothing."""
    scale: Literal["std", "none"] = "std"
    """Whether to divide by the group's standard deviation."""


class DiscountedCredit(ComparedCredit):
    """What methods share that look ahead."""

    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per turn."""


class OutcomeCredit(ComparedCredit):
    """GRPO: one number an episode, against its group, for all its turns."""

    method: Literal["outcome"] = "outcome"


class TurnReturnCredit(DiscountedCredit):
    """The discounted return from each turn on, against the group's at the same turn."""

    method: Literal["turn_return"] = "turn_return"


class TurnDiscountCredit(DiscountedCredit):
    """AReaL's discount by turns: what came late is worth less to the turns before it."""

    method: Literal["turn_discount"] = "turn_discount"
    form: Literal["sum", "max", "attempts"] = "sum"
    """`sum`: a turn's own reward and the discounted ones of the turns after it. `max`: the best of them.
    `attempts`: one number for all turns, the episode's reward times gamma for each turn after the first."""


class MtGrpoCredit(ComparedCredit):
    """MT-GRPO: the outcome against the group's, and each turn's own reward against the group's at that turn."""

    method: Literal["mt_grpo"] = "mt_grpo"
    weight: float = Field(default=1.0, ge=0.0)
    """Of the turn's own advantage, beside the outcome's."""
    outcome: list[str] | None = None
    """Names of the rewards that judge the outcome; left out, whatever the last turn holds."""


class GigpoCredit(ComparedCredit):
    """GiGPO: the episode against its group, and each turn against the group's turns from the same state."""

    method: Literal["gigpo"] = "gigpo"
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per turn, in the return that turns of one state are compared by."""
    weight: float = Field(default=1.0, ge=0.0)
    """Of the turn's advantage, beside the episode's."""
    state_key: str | None = None
    """A CEL expression, or the name of a fact, told when a turn begins: turns of the same value are of the same state.
    Left out: what the model was shown since its last turn, word for word."""


class ScoreCredit(DiscountedCredit):
    """SCoRe's shaping: an attempt earns extra for being better than the one before, and loses for being worse."""

    method: Literal["score"] = "score"
    alpha: float = Field(default=1.0, ge=0.0)
    """Of the bonus: alpha times the difference from the attempt before."""
    reward: str | None = None
    """The reward that scores an attempt; left out, all that a turn holds."""


class ProgressCredit(DiscountedCredit):
    """A score's rise pays the turns that led to it: differences of successive scores, spread backwards."""

    method: Literal["progress"] = "progress"
    reward: str | None = None
    """The reward that is the score so far; left out, all that a turn holds."""
    decay: float = Field(default=1.0, ge=0.0, le=1.0)
    """How much less each turn further back is paid: 1 pays all alike, 0 pays only the turn that was scored."""


class RedistributeCredit(ComparedCredit):
    """RUDDER-like: a turn earns by how much it changed the return that was to be expected."""

    method: Literal["redistribute"] = "redistribute"
    state_key: str | None = None
    """As in `gigpo`. Left out: a state is how many turns have passed and what they have earned."""


class BilevelGaeCredit(Contract):
    """VAGEN's bi-level GAE: over turns first, then over the tokens inside each. Needs a critic's values."""

    method: Literal["bilevel_gae"] = "bilevel_gae"
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per turn."""
    lam: float = Field(default=1.0, ge=0.0, le=1.0)
    """GAE's lambda over turns."""
    token_gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per token inside a turn."""
    token_lam: float = Field(default=1.0, ge=0.0, le=1.0)
    """GAE's lambda over tokens."""


class TurnPpoCredit(Contract):
    """Turn-PPO: GAE in which a turn is one action. Needs a critic's values."""

    method: Literal["turn_ppo"] = "turn_ppo"
    gamma: float = Field(default=0.99, ge=0.0, le=1.0)
    """Discount per turn."""
    lam: float = Field(default=0.9, ge=0.0, le=1.0)
    """GAE's lambda."""


class EntryCredit(Entry):
    """A method of one's own: `function(group: list[Member], **with)` gives an array of [turns] for each episode."""

    method: Literal["entry"] = "entry"
    state_key: str | None = None
    """As in `gigpo`, for a function that reads `Member.keys`."""


CreditSpec = Annotated[
    OutcomeCredit
    | TurnReturnCredit
    | TurnDiscountCredit
    | MtGrpoCredit
    | GigpoCredit
    | ScoreCredit
    | ProgressCredit
    | RedistributeCredit
    | BilevelGaeCredit
    | TurnPpoCredit
    | EntryCredit,
    Field(discriminator="method"),
]
"""How turn rewards become advantages."""

_CREDIT: TypeAdapter[CreditSpec] = TypeAdapter(CreditSpec)


def read_credit(data: Any) -> CreditSpec:
    """`{method: turn_return, gamma: 0.9}` -> the spec of that method; nothing at all is `outcome`.

    Raises:
        ValidationError: there is no such method, or it does not have such a key.
    """
    return _CREDIT.validate_python(data or {"method": "outcome"})


class RewardsSpec(Contract):
    """How rewards arise from what the worlds wrote."""

    reassign: list[ReassignRule] = Field(default_factory=list)
    """Tried in order after the state's own rewards are written."""
    credit: CreditSpec = Field(default_factory=OutcomeCredit)
    """How turn rewards become advantages; `method` says which way."""
    placement: Literal["last", "spread"] = "last"
    """Where a turn's reward lies in `token_rewards`: on its last sampled token, or in equal parts on all of them."""
    scorer: ScorerSpec | None = None
    """Asked once at the end, beside the environment's own `score`: `math-verify`, a function, or a model as judge."""


class RecoverSpec(Contract):
    """What the model is told when its reply cannot be used: text, or a list of text and image parts.

    `{{task.question}}` is a field of the task, in all of them. An image's path is relative to the spec.
    """

    malformed: Words = DEFAULT_MALFORMED
    """For a tool call that could not be read. `{{problem}}` is what was wrong, `{{raw}}` the attempt."""
    wrong: Words | None = None
    """For an answer that the user finds wrong, with the fields that the user gives; its own words when left out."""
    no_answer: Words | None = None
    """For a reply in which the user finds no answer, likewise."""


class RolloutSpec(Contract):
    """How many episodes run, and how many at once."""

    samples_per_task: int = Field(default=1, ge=1)
    """Episodes of each task: one group."""
    concurrency: int = Field(default=64, ge=1)
    """Generations in flight. A waiting tool or user holds none."""
    live_episodes: int | None = Field(default=None, ge=1)
    """Episodes begun and not yet done; twice `concurrency` when left out."""
    seed: int = Field(default=0, ge=0)
    """Every episode's seed, and through it every turn's, derives from it."""
    salt: int = Field(default=0, ge=0)
    """Changes the sampling seed of every turn and nothing else: what a fork samples anew with."""
    out: str = "runs"
    """Folder that runs are stored under, relative to where the engine is started."""


class EpisodeSpec(Contract):
    """One episode, declared. `engine validate` checks it, `engine run` runs it."""

    spec: Literal["episode/v1"]
    """Version of this format."""
    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Names the run's folder."""
    description: str = ""
    model: ModelSpec
    backend: BackendSpec = Field(default_factory=LocalBackendSpec)
    sampling: SamplingParams = Field(default_factory=SamplingParams)
    tasks: TasksSpec
    prompt: list[PromptMessage] = Field(default_factory=list)
    """How each episode begins; the environment's own messages follow."""
    environment: EnvironmentSpec | None = None
    tools: list[ToolSpec] = Field(default_factory=list)
    user: UserSpec | None = None
    users: dict[str, UserSpec] = Field(default_factory=dict)
    """Several users by name, instead of `user`: `tasks.user` says which of them a task has."""
    machine: MachineSpec = Field(default_factory=lambda: MachineSpec(preset="tools_and_user"))
    limits: LimitsSpec = Field(default_factory=LimitsSpec)
    rewards: RewardsSpec = Field(default_factory=RewardsSpec)
    recover: RecoverSpec = Field(default_factory=RecoverSpec)
    isolation: IsolationSpec | None = None
    """Where environment, tools, users, scorer and actions of the spec's own run, unless they say so themselves: `thread`
    (when left out) or `process`."""
    rollout: RolloutSpec = Field(default_factory=RolloutSpec)
    train: TrainSpec | None = None
    """How `engine train` has the model learn; everything else leaves it alone."""

    @property
    def people(self) -> dict[str, UserSpec]:
        """Every user by name; the one of `user` has the empty name."""
        return {"": self.user} if self.user is not None else self.users

    def isolation_of(self, own: IsolationSpec | None) -> IsolationSpec:
        """Where something runs whose own key `isolation` is `own`."""
        whole = (own or IsolationSpec()).over(self.isolation)
        return whole if whole.mode is not None else IsolationSpec(mode="thread")

    @model_validator(mode="after")
    def _users_are_chosen(self) -> EpisodeSpec:
        if self.user is not None and self.users:
            raise ValueError("give `user` (one for all tasks) or `users` (chosen by `tasks.user`), not both")
        if self.users and self.tasks.user is None:
            raise ValueError("`users` needs `tasks.user`: the row's field that names a task's user")
        if self.tasks.user is not None and not self.users:
            raise ValueError("`tasks.user` chooses among `users`, and there are none")
        return self

    @field_validator("machine", mode="before")
    @classmethod
    def _preset_by_name(cls, value: Any) -> Any:
        return {"preset": value} if isinstance(value, str) else value
