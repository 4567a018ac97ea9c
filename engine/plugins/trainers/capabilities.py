"""What other trainers carry of what a spec uses: one table, read by `engine validate --trainer` and by docs/trainers.md.

The table is about each trainer's hand-over: which values of a training row reach its loss, if the engine runs the episodes and the
trainer updates the weights. It was read in the trainer's source, in the version that is named; `ran` says where this was
also executed. Nothing here imports a trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec
    from engine.spec.text.diagnostic import Diagnostic

Status = Literal["carried", "approximated", "refused", "unknown"]
"""`carried`: exactly. `approximated`: something of it is lost. `refused`: it does not arrive. `unknown`: nobody has looked."""

THINGS: Mapping[str, str] = {
    "token_ids": "sampled token ids, never tokenised again",
    "masks": "a loss mask with observations between sampled tokens",
    "logprobs": "the sampler's log-probs, for a rollout correction",
    "versions": "the weight version of each token",
    "turn_credit": "an advantage for each turn",
    "token_bonuses": "an advantage for each token",
    "branches": "several rows of one episode",
    "images": "images of any turn",
    "reward_names": "rewards by name",
    "oversampling": "groups that are left out and replaced",
    "expert_routing": "the experts that the sampler chose (mixture of experts)",
    "kl_in_reward": "a KL penalty in the reward",
}
"""The things that a spec may use, in the order of the table."""


@dataclass(frozen=True, slots=True)
class Carried:
    """How a trainer carries one thing."""

    status: Status
    how: str
    """By what it is carried, what is lost, or why it is refused."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """One trainer."""

    title: str
    version: str
    """The version, or the commit, that the table is about."""
    ran: bool
    """Whether the hand-over of advantages was executed, and not only read in the source."""
    way_in: str
    """The shortest way in."""
    things: Mapping[str, Carried]
    """One entry for each of `THINGS`; that of `kl_in_reward`, which none carries, is added."""
    notes: str = ""
    """What has been run with the engine's adapter, in Markdown; empty if there is no adapter."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "things", {**self.things, "kl_in_reward": _KL_IN_REWARD})

    def findings(self, loaded: LoadedSpec) -> list[Diagnostic]:
        """Return a finding for each thing that the spec uses and the trainer does not carry exactly."""
        from engine.plugins.trainers.check import RULE_OF, uses
        from engine.spec.text.diagnostic import Diagnostic

        found = []
        for use in uses(loaded):
            carried = self.things[use.thing]
            if carried.status == "carried":
                continue
            rule, severity, words = RULE_OF[carried.status]
            message = f"{self.title} {self.version}: {words}: {THINGS[use.thing]}; {carried.how}"
            found.append(Diagnostic(rule, severity, message, use.fix, loaded.origin(use.path), use.path))
        return found


def _yes(how: str) -> Carried:
    return Carried("carried", how)


def _partly(how: str) -> Carried:
    return Carried("approximated", how)


def _no(how: str) -> Carried:
    return Carried("refused", how)


_UNKNOWN = Carried("unknown", "not examined")
_KL_IN_REWARD = _no("the engine's advantages are made before the hand-over, without log-probs of a reference model")
_GROUPS_BEFORE = (
    "the engine leaves groups out and replaces them before the hand-over; the trainer's own filter stays off"
)

_TRL_NOTES = """\
The adapter, its arguments beside TRL's, and what remains exact: [from TRL](from-trl.md). Run with TRL 1.16.0 on a CPU by
`tests/plugins/trainers/test_trainer_trl.py`: the loss of a batch of two turns equals the value that is computed by hand from the stored rows to 1e-6 (`grpo`, `dr_grpo`,
`dapo`); a tiny Qwen2.5-VL, Idefics3 and SmolVLM with images between their replies make two steps, with the log-probs of a plain pass of transformers without placeholders of images to 1e-5; a batch that lost something on
the way makes no update.

`python scripts/train_with_trl.py specs/train_credit.yaml --out OUT --several-rows leave_out --set model.path=MODEL`, MODEL made by `scripts/make_tiny_lm.py --teach 200 --seed 0`; 24 steps of
64 episodes of eight turns, seed 0, about one minute on two cores that also did other work. Mean reward of the step:

| credit | step 1 | step 6 | step 12 | step 18 | step 24 | largest `sampler/diff_max` of these steps |
|---|---|---|---|---|---|---|
| by turn (`turn_return`, `gamma: 0`) | -0.50 | -0.36 | 0.31 | 0.85 | 0.93 | 1.6e-6 |
| the same with `engine train` (other tasks in each step) | -0.56 | -0.40 | 0.55 | 0.77 | 0.92 | 4.6e-06 |
| by outcome | -0.50 | -0.50 | -0.22 | -0.17 | 0.07 | 1.7e-6 |

A vision model of 0.35 M parameters with two squares in each episode: `python scripts/train_with_trl.py specs/train_color_square.yaml --several-rows leave_out --out OUT --set model.path=MODEL`,
MODEL made by `scripts/make_tiny_vlm.py --teach 150 --right 0.4 --seed 0`; 128 steps of 64 episodes, eight minutes on two cores that also did other work. Mean reward at steps 1, 16, 32, 48, 64,
96 and 128: 0.35, 0.39, 0.70, 0.88, 0.88, 0.91, 0.98 (`engine train`, seed 0: 0.39 to 0.98); `sampler/diff_max` at most 1.4e-6.

SmolLM2-135M on `specs/train_arithmetic.yaml` in float32, one step of 64 episodes: mean reward 0.13, `sampler/diff_mean` 2.0e-6, `sampler/diff_max` 1.9e-5.
Ten steps of 32 episodes (`--set train.precision=float32 --set backend.dtype=float32 --set train.tasks_per_step=4 --set train.steps=10`), mean reward of each step: 0.15, 0.35, 0.51, 0.55, 0.56, 0.71, 0.78, 0.66, 0.61, 0.39;
`sampler/diff_max` at most 2.9e-5. `engine train` with the same settings and `train.dynamic_sampling=false`: 0.15, 0.32, 0.20, 0.47, 0.72, 0.58, 0.56, 0.63, 0.90, 0.97. Four tasks in a step are few, so single steps say
little: the means of the first and the last five steps are 0.42 and 0.63 under TRL, 0.37 and 0.73 under `engine train`.
"""

_SLIME_NOTES = """\
The adapter, its files beside slime's, and what is refused: [from slime](from-slime.md). slime's own contract tests (`tests/plugin_contracts`, commit 624b824a8) pass over the
generate function, the rollout function (also as the evaluation's) and the converter: 36 passed. Their arguments are stand-ins without values, so a wrapper adds the spec, the
router and the flags, and gives the converter samples of the engine. `build_dp_schedule`, `tensorize_rollout_data_for_training` and `slice_log_prob_with_cp` of that commit ran on the
converter's columns, with a stand-in of Megatron's parallel state and one or two processes of context parallelism: the advantages are the engine's, bit for bit. An episode with four images in four turns (the
processor of a tiny Qwen2.5-VL, a server that replies the same ids) is one sample with the tensors of its row. All by
`SLIME_SOURCE=…/slime pytest -m slow tests/plugins/trainers/trainer_slime`. 64 episodes that `engine train` trained on (48 with one row, 16 with two), through converter and advantage function: the same
advantages by token to 1e-6 (`pytest -m slow tests/plugins/trainers/trainers_agree/test_agree_slime.py`). slime's Megatron loss was read and not run: it needs GPUs.
"""

_AGREE = "`tests/plugins/trainers/trainers_agree`: 64 recorded episodes (48 with one row in groups of different sizes, 16 with two rows)"

_SKYRL_NOTES = f"""\
Users start from `EnginePPOExp`, a subclass of SkyRL's `BasePPOExp`. The data set is the spec's tasks, so `data.train_data` is not read. A start script:

```python
import sys
import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.utils import initialize_ray, validate_cfg
from engine.plugins.trainers.skyrl import EnginePPOExp, register_estimator


@ray.remote(num_cpus=1)
def train(cfg):
    EnginePPOExp(cfg, "spec.yaml", "runs/with-skyrl").run()


cfg = SkyRLTrainConfig.from_cli_overrides(
    ["trainer.algorithm.advantage_estimator=engine", "trainer.eval_interval=-1", *sys.argv[1:]]
)
register_estimator()
validate_cfg(cfg)
initialize_ray(cfg)
ray.get(train.remote(cfg))
```

It registers the estimator `engine`, runs whole groups over SkyRL's inference engine client, and compares the sums of both sides after each `compute_advantages_and_returns`: a difference
stops the training before the update. Settings of SkyRL that would change the advantages, or that have no effect, are refused by name (`refuse_settings`), such as a temperature other than 1
without `logprobs_mode: processed_logprobs`, because vLLM then reports the log-probs of temperature 1. SkyRL computes its metrics of rewards from advantages: `reward/avg_raw_reward` is replaced by
the true mean, the others are removed, and the metrics of `engine train` are under `engine/`. An episode with several rows stops the training, or is left out and counted (`several_rows="leave_out"`).

Images: the spec names `backend: {{kind: sglang}}`, because the engine's own `vllm` backend takes none; SkyRL's vLLM servers sample in either case. Each distinct image is sent once to
`/v1/chat/completions/render`, at the size of its grid, and its features go with the expanded ids of each turn (`mm_features`); the number of placeholders of each image, and the pixels of the first one,
are compared with those of the rows. Set `trainer.remove_microbatch_padding=false`. A place without a trainable episode shows the images of another row, without trained tokens; a batch in which only some
trained rows have images is refused. SkyRL's batch holds the pixels as float32, once for all rows with the same images in the driver.

Experts: `backend.routed_experts` with `generator.inference_engine.enable_return_routed_experts=true`, `trainer.strategy=megatron` and
`trainer.policy.megatron_config.moe_enable_routing_replay=true`; not with images, because SkyRL's endpoint for experts drops them. SkyRL's batch function takes the experts as lists of numbers: about 100 MB for
10,000 tokens of 48 layers and 8 experts.

Ran with SkyRL 0.3.0 on a CPU (`SKYRL_PYTHON=… pytest -m slow tests/plugins/trainers/trainer_skyrl`): the experiment, its data loader, `prepare_generator_input`, `RayPPOTrainer.generate`,
`validate_generator_output`, `postprocess_generator_output`, `convert_to_training_input` and `compute_advantages_and_returns`, on 12 episodes of two turns whose client is scripted: ids,
log-probs and advantages by token are those of the run store to 1e-6. With images in the prompt, a tool's result and a user's turn: `HFModelWrapper` and `PolicyWorkerBase` compute the log-probs of `engine train` to 1e-5 on
tensors that are equal bit for bit, and a step changes the vision tower. The same last four functions on the 48 episodes with one row of {_AGREE}.
By contract only: `RemoteInferenceClient` and its vLLM servers, `_normalize_advantages`, FSDP and Megatron workers, a whole training. On Python 3.11 SkyRL's
types cannot be imported with pydantic 2.14, so use Python 3.12 (the test replaces `typing.TypedDict`).

Certificate of exactness: ids, masks, log-probs and advantages are those of the rows. The client does not report the prompt that its servers computed on, and nothing compares SkyRL's own log-probs with
the sampler's except its metric `policy/rollout_train_logprobs_abs_diff_max`. SkyRL tells no weight versions: all tokens of a step have the number of updates before it.
"""

_AREAL_NOTES = f"""\
Users start from `EngineWorkflow`, a `RolloutWorkflow` whose one call runs one group, so `gconfig.n_samples` is 1 and AReaL's batch size counts groups:

```python
from areal import PPOTrainer
from engine.plugins.trainers.areal import task_dataset, watch, workflow_arguments

arguments = workflow_arguments(config, "spec.yaml", "runs/with-areal")
with PPOTrainer(config, train_dataset=task_dataset("spec.yaml")) as trainer:
    watch(trainer.actor)
    trainer.train(workflow="engine.plugins.trainers.areal.EngineWorkflow", workflow_kwargs=arguments)
```

`workflow_arguments` refuses each setting of AReaL that would change the advantages, by name. `watch` compares the sums of both sides after each `compute_advantages`, and a difference stops the
training before the update. Each rollout process has a run store of its own, `process-<n>/rollouts` in the folder. A group without trainable episodes is rejected, and AReaL runs another one. If the
engine itself fails in a group, the error is logged and AReaL goes on without the group.

Images go to SGLang with one placeholder each, as PNGs of their grid's size. Before the first episode each server expands a sample prompt: one that tokenises it again is refused, as SGLang before 0.5.23 does
(AReaL 1.0.4 requires 0.5.10.post1, so install a newer one for its servers), and AReaL's vLLM takes images with messages only. Rows hold pixels as bytes, once for an image, until AReaL's code reads them;
AReaL's own RPC between machines reads them, so floats travel there. `compute_advantages` gives every group the images of all groups: `watch` gives each its own again, and compares each row's images.
A row without an image has a grid of no images, so batches without images get positions; where several processes train, such rows are refused, because their layers of the vision tower wait for each other.
transformers 5.3, the newest that AReaL allows, multiplies the time of Qwen2.5-VL's images by `tokens_per_second`, which model servers do not: the adapter refuses it until `vision_config.tokens_per_second` is 1 in
the model's `config.json` (it is used for videos otherwise). Set `rollout.check_trajectory_format=false`. AReaL trains without the experts of its sampler, so `backend.routed_experts` is refused.

Ran with AReaL 1.0.4 on a CPU (`AREAL_PYTHON=… pytest -m slow tests/plugins/trainers/trainer_areal`): the workflow by its import path, `WorkflowExecutor.rollout_batch` with its check of
trajectories, and `PPOActor.compute_advantages` with a reward that AReaL scales and shifts, on 12 episodes of two turns whose inference engine is scripted and is updated inside each reply, with
one row and with two rows for each episode: ids, log-probs, weight versions and advantages by token are those of the run store to 1e-6. With images in the prompt, a tool's result and a user's turn, and without any:
`FSDPPPOActor` with gloo computes the log-probs of `engine train` to 1e-5 on tensors that are equal bit for bit, and `ppo_update` changes the vision tower. `check_trajectory_format`, `concat_padded_tensors` and
`PPOActor._compute_advantages` on all of {_AGREE}. By contract only: AReaL's SGLang and vLLM servers, `PPOTrainer`, its controllers (whose tensors on other
machines `watch` fetches), Megatron and packed rows. The tests ran with torch 2.13,
which is newer than AReaL's pin, and with AReaL installed without its dependencies.

Certificate of exactness: ids, masks, log-probs, versions by token and advantages are those of the rows. The advantage at a row's last token is R − (R − A), equal to A to within one rounding.
AReaL does not report the prompt that its servers computed on, and sends them no sampling seed.
"""

_VERL_NOTES = f"""\
The adapter, its files beside verl's, its settings and what is refused: [from verl](from-verl.md), whose example (tool, YAML, spec and settings of the command) ran with verl's configuration and its data set
(`tests/plugins/trainers/test_trainer_verl_page.py`). Install `cachetools` too: verl 0.9.1 imports it and does not require it; the extra `verl` of the engine has it.

Run with verl 0.9.1 on a CPU by `tests/plugins/trainers/test_trainer_verl.py`: real configuration, TransferQueue on a local Ray, the registered trainer's `_compute_advantage`, and verl's padding rows; the
servers are replaced by a scripted client. The advantages by token are those of the stored rows to 1e-6, and a batch that lost a row is an error before an update. The rows, verl's
padding and `_compute_advantage` also ran on all of {_AGREE}: the advantages that `engine train` trained on, by token to 1e-6. `verl.trainer.main_ppo` with the settings of the page made
two steps on a CPU, with stand-ins for its servers and its actor (`test_trainer_verl_page.py`): task runner, data loader, replay buffer, padding, advantages and metrics are verl's own; versions count up, a
group whose server was down is replaced, and the updates get the advantages of the run store. Images: verl's training worker and FSDP engine on a CPU compute the log-probs of `engine train` to 1e-5 over episodes of
up to four turns, exchanged images stop the training, and an optimizer step also changes the vision tower (`test_trainer_verl_images.py`). Not run: verl's servers, Megatron and VeOmni, which need GPUs.

Which certificate of exactness remains: ids, masks and log-probs are those that verl's server reported, and each bridge between turns is checked against the chat template. verl reports
the smallest and the largest weight version of a reply: all its tokens get the smallest, and `collapsed_versions` counts replies in which they differ. Sampling seeds of the engine are not sent, so an
episode is not sampled again bit by bit. Log-probs of a server before and after `top_p` and `top_k` have not been compared.
"""

_VERL_LOOP_NOTES = """\
For verl's own agent loop manager, estimator and trainer. The YAML file of `actor_rollout_ref.rollout.agent.agent_loop_config_path`, with
`actor_rollout_ref.rollout.agent.default_agent_loop=engine`; the data file is that of `write_tasks`:

```yaml
- name: engine
  _target_: engine.plugins.trainers.verl.agent_loop.EngineAgentLoop
  spec: /data/spec.yaml
  folder: /data/runs/with-verl
```

What differs from the manager (`verl`): verl makes an object for each episode, forms the groups, and gives all tokens of an episode one advantage. So the spec's credit must be a formula of verl's,
and other pairs are refused by name: `adv_estimator=grpo` is `{method: outcome, baseline: mean, scale: std}`, with `norm_adv_by_std_in_grpo=false` `scale: none`; `rloo` is
`{method: outcome, baseline: leave_one_out, scale: none}`. Refused too: `train.overlong`, KL in the reward, a teacher, a reward model, and verl's validation, which asks for another
temperature. In the V1 trainer, rows are handed over when all episodes of a prompt have ended, and none if fewer than `train.min_group` can be trained on: verl trains on what a failed
prompt has, and gives an episode without others its raw reward. An episode that cannot be trained on is an exception: the V1 trainer counts the prompt as failed and, with `sync_refill_failed_groups`, takes another one; the older trainer
stops. The older trainer pads: `prompt_length` and `response_length` must hold the longest row. The update is verl's own, so the sums of both sides are not compared. Each worker has a run store of
its own, `process-<n>/rollouts` in the folder; `engine show` and `engine view` read each of them.

Run with verl 0.9.1 on a CPU by `tests/plugins/trainers/test_trainer_verl_loop.py`: `AgentLoopManagerTQ` and its workers on a local Ray with the real TransferQueue, and the V1 trainer's
`_compute_advantage`, on 12 episodes of two turns, half of them with two rows (`grpo`; `rloo` on the others): ids, masks, log-probs and rewards are those of the run stores, and the advantages those of
the spec's credit to 1e-6; a group whose user fails is a failed prompt without rows. `AgentLoopManager` (DataProto) with two workers: the same values, padded. The servers are
replaced by a scripted client. verl computes in float32 and divides by the standard deviation plus 1e-6, so a group of equal rewards that are no binary fractions has advantages of rounding errors over
1e-6, where the engine gives 0: 0.056 for eight rewards of 0.7.
"""

TRL = Trainer(
    "TRL GRPOTrainer",
    "1.16.0",
    True,
    "`engine.plugins.trainers.trl`: the trainer's model is the backend of a `rollout_func`, and a subclass whose `_generate_and_score_completions` sets the advantages",
    {
        "token_ids": _yes("`prompt_ids` and `completion_ids` of `rollout_func`"),
        "masks": _yes("`env_mask`, if the trainer has neither `tools` nor `environment_factory`"),
        "logprobs": _partly(
            "`old_per_token_logps` are the sampler's, so the clipped ratio is relative to the sampler; `train.rollout_correction` is not applied"
        ),
        "versions": _no("a row has no weight versions; the run store has them"),
        "turn_credit": _yes("the subclass gives advantages [batch, tokens]; `_compute_loss` takes them"),
        "token_bonuses": _yes("as `turn_credit`"),
        "branches": _no(
            "there is one row for each prompt that the trainer asks for; an episode with several rows stops the training, or is left out and counted"
        ),
        "images": _partly("models of Qwen's families, Idefics3 and SmolVLM, without a KL penalty"),
        "reward_names": _partly("metrics of TRL's log (`reward/<name>`); the loss reads advantages"),
        "oversampling": _partly("each prompt needs a row: a group without signal stays, with advantage 0"),
        "expert_routing": _no("TRL has no routing replay"),
    },
    notes=_TRL_NOTES,
)
VERL = Trainer(
    "verl",
    "0.9.1 (V1 trainer)",
    True,
    "`engine.plugins.trainers.verl`: an agent loop manager that writes TransferQueue rows with a column of advantages, and a registered trainer that reads it",
    {
        "token_ids": _yes("`prompts` and `responses` of the manager's rows"),
        "masks": _yes("`response_mask`"),
        "logprobs": _yes("`rollout_log_probs`"),
        "versions": _partly("`min_global_steps` and `max_global_steps` of a row; not by token"),
        "turn_credit": _yes("a column and a registered trainer, or `rm_scores` by token and an estimator"),
        "token_bonuses": _yes("as `turn_credit`"),
        "branches": _yes("one row each, by the index in the key"),
        "images": _yes("`multi_modal_inputs` and `position_ids` with four lines; models of Qwen-VL's families"),
        "reward_names": _partly("`extra_fields` for metrics, the same keys in all rows; the loss reads one sum"),
        "oversampling": _partly(
            f"{_GROUPS_BEFORE}; in sync mode, a group with a failed episode trains without it unless `sampler.sync_refill_failed_groups` is set"
        ),
        "expert_routing": _yes("`routed_experts`, which verl's Megatron and VeOmni engines read; FSDP is refused"),
    },
    notes=_VERL_NOTES,
)
VERL_AGENT_LOOP = Trainer(
    "verl with its own agent loop manager",
    "0.9.1",
    True,
    "`engine.plugins.trainers.verl.agent_loop`: an agent loop by YAML (`_target_`); verl forms the groups and computes the advantages from one reward for each episode",
    {
        "token_ids": _yes("`prompt_ids` and `response_ids` of `AgentLoopOutput`"),
        "masks": _yes("`response_mask`"),
        "logprobs": _yes("`response_logprobs`"),
        "versions": _partly("`min_global_steps` and `max_global_steps` of a row; not by token"),
        "turn_credit": _no(
            "an agent loop returns one reward, which verl gives to all tokens; `turn_scores` reach no loss. The engine's manager (`verl`) carries it"
        ),
        "token_bonuses": _no("as `turn_credit`"),
        "branches": _partly(
            "one `AgentLoopOutput` each in the V1 trainer with `adv_estimator=grpo`; otherwise the prompt fails with an error that names the episode"
        ),
        "images": _yes("as `verl`, in the V1 trainer"),
        "reward_names": _partly("`reward_extra_info` of the V1 trainer, for metrics; the loss reads the sum"),
        "oversampling": _no(
            "the loop runs single episodes; set `train.dynamic_sampling: false`, and use verl's `algorithm.filter_groups`"
        ),
        "expert_routing": _yes("as `verl`: `routed_experts` of `AgentLoopOutput`"),
    },
    notes=_VERL_LOOP_NOTES,
)
SLIME = Trainer(
    "slime",
    "624b824a8 (0.3.1)",
    True,
    "`engine.plugins.trainers.slime`: a rollout function (or a generate function), a converter and an advantage function, by slime's options",
    {
        "token_ids": _yes("`Sample.tokens`"),
        "masks": _yes("`Sample.loss_mask`"),
        "logprobs": _partly(
            "every row has them; the loss uses them only with `--use-rollout-logprobs` or `--use-tis`, and the engine refuses `train.rollout_correction` without `--use-tis`"
        ),
        "versions": _no("`weight_versions` are on the samples and are not given to the training"),
        "turn_credit": _yes("`rewards` as a tensor by token in the converter, read by the advantage function"),
        "token_bonuses": _yes("as `turn_credit`"),
        "branches": _yes("a list of samples with one `rollout_id`; the converter replaces slime's normalisation"),
        "images": _yes("`multimodal_train_inputs`"),
        "reward_names": _partly("`raw_reward` holds the sum; `metadata` does not reach the training"),
        "oversampling": _yes(
            f"{_GROUPS_BEFORE}; by the rollout function (`train.dynamic_sampling`), or with the generate function by slime's filter"
        ),
        "expert_routing": _yes("`rollout_routed_experts`: the column of a row, for one token less than `tokens`"),
    },
    notes=_SLIME_NOTES,
)
SKYRL = Trainer(
    "SkyRL",
    "0.3.0",
    True,
    "`engine.plugins.trainers.skyrl`: a subclass of `BasePPOExp` with a `GeneratorInterface` that runs the episodes, and a registered advantage estimator that returns the rewards by token",
    {
        "token_ids": _yes("`prompt_token_ids` and `response_ids`"),
        "masks": _yes("`loss_masks`; the estimator sees observations too, so advantages are 0 there"),
        "logprobs": _partly("`rollout_logprobs` are used only with `off_policy_correction`"),
        "versions": _no("staleness is counted by the step at which an episode began"),
        "turn_credit": _yes("rewards by token, which the registered estimator returns as advantages"),
        "token_bonuses": _yes("as `turn_credit`"),
        "branches": _no("one row for each prompt; in step-wise mode all rows get the number of the last one"),
        "images": _yes(
            "`pixel_values` and `image_grid_thw`, sampled with `mm_features`; Qwen's families, images in each trained row or in none, not together with experts"
        ),
        "reward_names": _partly("`env_metrics` and `rollout_metrics`; its own reward metrics are sums of advantages"),
        "oversampling": _partly(f"{_GROUPS_BEFORE}: `zero_variance_filter` is ignored with rewards by token"),
        "expert_routing": _yes("`rollout_expert_indices`, which its Megatron workers read; FSDP is refused"),
    },
    notes=_SKYRL_NOTES,
)
AREAL = Trainer(
    "AReaL",
    "1.0.4",
    True,
    "`engine.plugins.trainers.areal`: a `RolloutWorkflow` whose column `values` holds the negative advantages, with `actor.discount: 0`, no norms, no critic and `kl_ctl: 0`",
    {
        "token_ids": _yes("`input_ids`"),
        "masks": _yes("`loss_mask`"),
        "logprobs": _yes("`logprobs`"),
        "versions": _yes("`versions`"),
        "turn_credit": _yes("the column `values`; the last token is equal to within one rounding"),
        "token_bonuses": _yes("as `turn_credit`"),
        "branches": _yes("several rows in what the workflow returns"),
        "images": _yes("`multi_modal_input`, `mm_token_type_ids`; SGLang 0.5.23 or newer; Qwen's families"),
        "reward_names": _partly("`rewards` has one number for each row"),
        "oversampling": _partly(f"{_GROUPS_BEFORE}: `should_accept_fn` accepts episodes and not groups"),
        "expert_routing": _no("no trainer of AReaL reads them; `return_routed_experts` gives them to workflows"),
    },
    notes=_AREAL_NOTES,
)
PRIME_RL = Trainer(
    "prime-rl",
    "559b44772 (0.8.0)",
    False,
    "files of `MicroBatch` for its trainer, without its orchestrator",
    {
        "token_ids": _yes("`token_ids`"),
        "masks": _yes("`mask`"),
        "logprobs": _yes("`logprobs`"),
        "versions": _no("a sample has temperatures by token and no weight versions"),
        "turn_credit": _yes("`advantages` by token"),
        "token_bonuses": _yes("`advantages` by token"),
        "branches": _yes("a sample each"),
        "images": _yes("`mm_kwargs`"),
        "reward_names": _no("a sample has no rewards"),
        "oversampling": _yes(_GROUPS_BEFORE),
        "expert_routing": _yes("`routed_experts`"),
    },
)
RLLM = Trainer(
    "rLLM",
    "9beb6e0f2 (0.3.0.pre)",
    False,
    "`Step.advantage` as a list, with `rllm.algorithm.use_precomputed_advantage: true`",
    {
        "token_ids": _yes("`prompt_ids` and `response_ids` of a step"),
        "masks": _yes("a step is a prompt and a response, so observations are in prompts"),
        "logprobs": _yes("`Step.logprobs`"),
        "versions": _partly("`Step.weight_version`: one for each step"),
        "turn_credit": _yes("`Step.advantage`; overwritten without the setting; zeros if its length differs"),
        "token_bonuses": _yes("`Step.advantage` as a list"),
        "branches": _yes("steps"),
        "images": _partly("only through its verl backend"),
        "reward_names": _partly("a step has one reward"),
        "oversampling": _UNKNOWN,
        "expert_routing": _UNKNOWN,
    },
)
TINKER = Trainer(
    "tinker",
    "tinker-cookbook 0.6.1",
    False,
    "a `Datum` for each row; training needs the hosted service",
    {
        "token_ids": _yes("`ModelInput` and `target_tokens`"),
        "masks": _yes("`mask`"),
        "logprobs": _yes("`logprobs`"),
        "versions": _no("a `Datum` has no weight versions"),
        "turn_credit": _yes("`advantages` by token"),
        "token_bonuses": _yes("`advantages` by token"),
        "branches": _yes("a `Datum` each"),
        "images": _yes("`ImageChunk`"),
        "reward_names": _partly("metrics of your own; a `Datum` has no rewards"),
        "oversampling": _yes(_GROUPS_BEFORE),
        "expert_routing": _UNKNOWN,
    },
)
ART = Trainer(
    "ART",
    "openpipe-art 0.5.18",
    False,
    "`Trajectory` objects",
    {
        "token_ids": _no("the conversation is rendered and tokenised again"),
        "masks": _partly("found in the text that is rendered again"),
        "logprobs": _partly("only where the choices of the API have them"),
        "versions": _partly("the first and the last policy version of a trajectory"),
        "turn_credit": _no("a trajectory has one advantage"),
        "token_bonuses": _no("a trajectory has one advantage"),
        "branches": _partly("`additional_histories`, which share the advantage"),
        "images": _no("trajectories hold text"),
        "reward_names": _partly("`metrics`; the loss reads `reward`"),
        "oversampling": _UNKNOWN,
        "expert_routing": _no("trajectories have no routing"),
    },
)
TRAINERS: Mapping[str, Trainer] = {
    "trl": TRL,
    "verl": VERL,
    "verl_agent_loop": VERL_AGENT_LOOP,
    "slime": SLIME,
    "skyrl": SKYRL,
    "areal": AREAL,
    "prime_rl": PRIME_RL,
    "rllm": RLLM,
    "tinker": TINKER,
    "art": ART,
}
"""The trainers by the name that `--trainer` takes."""
