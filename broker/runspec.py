"""The configuration of a run: every key, its default, its meaning.

One TOML file holds it; `deploy.config` reads, checks and prints it. It travels in the head record, so that an actor
needs no file. Only what somebody would configure stands here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class RunSection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """What is trained, and for how long."""

    name: Annotated[
        str,
        Meta(
            pattern="^[a-z0-9][a-z0-9-]{0,47}$",
            description="The run's name: lower-case letters, digits and dashes, at most 48. It appears in every id.",
        ),
    ]
    model: Annotated[
        str,
        Meta(
            min_length=1,
            description="The base model: a directory, a hub name (owner/name), or smollm2-135m-instruct (packaged).",
        ),
    ]
    steps: Annotated[int, Meta(ge=1, description="Optimizer steps to make.")] = 100
    target_reward: Annotated[
        float | None,
        Meta(description="Stop early once the mean reward of the last five steps reaches this. Leave out: never."),
    ] = None
    seed: Annotated[int, Meta(ge=0, description="Seeds task order, sampling and LoRA weights.")] = 0
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Meta(description="Weights' type. auto: bfloat16 on a GPU, float32 on a CPU, where bfloat16 is slower."),
    ] = "auto"


class TasksSection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Where tasks come from."""

    source: Annotated[
        str,
        Meta(
            min_length=1,
            description="A .jsonl file, a Hugging Face dataset directory, or a class: path/to/file.py:Name or "
            "package.module:Name.",
        ),
    ]
    split: Annotated[str, Meta(description="Which split of a dataset directory.")] = "train"
    prompt_column: Annotated[
        str, Meta(description="The column that holds the prompt: a string, or a list of chat messages.")
    ] = "prompt"
    shuffle: Annotated[bool, Meta(description="Shuffle the tasks anew in each epoch (seeded).")] = True
    arguments: Annotated[
        dict[str, Any], Meta(description="Keyword arguments for the task source class, if source names one.")
    ] = {}


class EnvironmentSection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """How an episode goes, and what it is worth."""

    environment: Annotated[
        str,
        Meta(
            description="An Environment class (path/to/file.py:Name or package.module:Name). Empty: one turn, scored "
            "by `rewards`."
        ),
    ] = ""
    arguments: Annotated[dict[str, Any], Meta(description="Keyword arguments for the environment class.")] = {}
    rewards: Annotated[
        list[str],
        Meta(
            description="Reward functions, path/to/file.py:name or package.module:name, sync or async. TRL's "
            "signature: reward(completions, **columns) -> list[float]."
        ),
    ] = []
    reward_weights: Annotated[list[float], Meta(description="One weight per reward function. Empty: all 1.")] = []
    system_prompt: Annotated[str, Meta(description="Put before every prompt as a system message, if not empty.")] = ""
    max_turns: Annotated[int, Meta(ge=1, description="An episode is cut after this many replies.")] = 16
    episode_timeout: Annotated[
        float, Meta(gt=0, description="Seconds after which an episode fails, whatever it is doing.")
    ] = 600.0
    group_timeout: Annotated[
        float, Meta(gt=0, description="Seconds after which a group is closed as failed or expired.")
    ] = 1800.0

    @property
    def user_code(self) -> list[str]:
        """The names of the user's code that runs on actors."""
        return [*self.rewards, *([self.environment] if self.environment else [])]


class SamplingSection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """How replies are sampled. Training samples from the full distribution: there is no top_p and no top_k."""

    max_new_tokens: Annotated[int, Meta(ge=1, description="The longest reply, in tokens.")] = 256
    temperature: Annotated[float, Meta(gt=0, le=10, description="Applied in the engine and in the learner.")] = 1.0


OBJECTIVES: dict[str, dict[str, float | str]] = {
    "importance_sampling": {"normalisation": "token"},
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "normalisation": "token"},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "normalisation": "token"},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "normalisation": "sequence"},
    "cispo": {"ratio_max": 5.0, "normalisation": "token"},
    "decoupled_ppo": {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "ratio_max": 5.0,
        "proximal": "interpolated",
        "normalisation": "token",
    },
    "truncated_is": {"ratio_max": 2.0, "importance_level": "token", "normalisation": "token"},
    "masked_is": {"ratio_min": 0.5, "ratio_max": 5.0, "importance_level": "token", "normalisation": "token"},
    "cross_entropy": {"normalisation": "token"},
    "distillation": {"ratio_max": 5.0, "teacher": "", "normalisation": "token"},
}
"""The parameters that each objective uses, with their defaults. What stands here for none may be set for all."""

PARAMETERS = ("clip_low", "clip_high", "dual_clip", "ratio_min", "ratio_max", "importance_level", "proximal")
"""Keys of [algorithm] that only some objectives' functions take; None where the objective does not."""

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, lt=1)]
AtLeastOne = Annotated[int, Meta(ge=1)]
NaturalNumber = Annotated[int, Meta(ge=0)]
Probability = Annotated[float, Meta(gt=0, le=1)]
Temperature = Annotated[float, Meta(ge=0, le=10)]


class AlgorithmSection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Groups, staleness, advantages, the objective."""

    group_size: Annotated[int, Meta(ge=2, description="Episodes per task (G).")] = 8
    groups_per_step: Annotated[int, Meta(ge=1, description="Groups that make one optimizer step.")] = 8
    max_staleness: Annotated[
        int, Meta(ge=0, le=64, description="How many versions old a trained token may be; 0 is on-policy.")
    ] = 2
    mean_staleness: Annotated[
        Positive | None,
        Meta(
            description="When the groups that wait for the learner are staler than this in the mean, fewer are issued. "
            "Leave out: max_staleness alone bounds it."
        ),
    ] = None
    priority: Annotated[
        Literal["oldest", "reward_variance"],
        Meta(
            description="Which waiting groups a step takes first. With reward_variance (largest first) others may wait "
            "until they are too stale."
        ),
    ] = "oldest"
    publish_every: Annotated[int, Meta(ge=1, description="Steps between two published versions.")] = 1
    min_group_size: Annotated[
        int, Meta(ge=0, description="A group with at least this many good episodes is trained. 0: half of group_size.")
    ] = 0
    dynamic_sampling: Annotated[
        float,
        Meta(
            ge=0,
            description="Groups whose rewards are all equal are replaced by others, up to this many times "
            "groups_per_step a step. 0: they are skipped, and the step is smaller.",
        ),
    ] = 0.0
    advantage: Annotated[
        Literal["grpo", "grpo_no_std", "dr_grpo", "rloo"],
        Meta(
            description="grpo: (reward - mean) / std of the group. grpo_no_std and dr_grpo: reward - mean, the latter "
            'with normalisation "constant". rloo: reward - mean of the others.'
        ),
    ] = "grpo"
    overlong_buffer: Annotated[
        int,
        Meta(
            ge=0,
            description="The last tokens before the longest possible completion, over which the reward falls by "
            "overlong_penalty. 0: no shaping.",
        ),
    ] = 0
    overlong_penalty: Annotated[
        float, Meta(gt=0, description="What a completion of full length loses, with overlong_buffer.")
    ] = 1.0
    objective: Annotated[
        Literal[
            "importance_sampling",
            "ppo_clip",
            "dapo",
            "gspo",
            "cispo",
            "decoupled_ppo",
            "truncated_is",
            "masked_is",
            "cross_entropy",
            "distillation",
        ],
        Meta(description="What a step minimises; docs/objectives.md has the formulas and each one's parameters."),
    ] = "ppo_clip"
    clip_low: Annotated[
        Fraction | None, Meta(description="ppo_clip, dapo, gspo, decoupled_ppo: clip below 1 - clip_low.")
    ] = None
    clip_high: Annotated[
        Positive | None, Meta(description="ppo_clip, dapo, gspo, decoupled_ppo: clip above 1 + clip_high.")
    ] = None
    dual_clip: Annotated[
        NotNegative | None,
        Meta(description="ppo_clip: bounds the ratio of punished tokens; more than 1 + clip_high. 0: none."),
    ] = None
    ratio_min: Annotated[
        NotNegative | None, Meta(description="masked_is: tokens with a smaller ratio are left out.")
    ] = None
    ratio_max: Annotated[
        Positive | None,
        Meta(description="cispo, truncated_is, decoupled_ppo, distillation: cut; masked_is: left out beyond it."),
    ] = None
    importance_level: Annotated[
        Literal["token", "sequence"] | None,
        Meta(description="truncated_is, masked_is: whether ratios are those of tokens or products over sequences."),
    ] = None
    proximal: Annotated[
        Literal["recomputed", "interpolated"] | None,
        Meta(description="decoupled_ppo: the proximal policy; interpolated by each token's staleness, or the current."),
    ] = None
    teacher: Annotated[
        str | None, Meta(description="distillation: the teacher, a model with the same tokens, named as run.model is.")
    ] = None
    normalisation: Annotated[
        Literal["token", "sequence", "constant"] | None,
        Meta(
            description="A step's loss is a mean over its tokens, a mean over its sequences' means, or a sum over "
            "sequences times normalisation_length. Leave out: the objective's own."
        ),
    ] = None
    normalisation_length: Annotated[
        AtLeastOne | None,
        Meta(description='With normalisation "constant". Leave out: the longest possible completion.'),
    ] = None
    kl_coef: Annotated[
        float,
        Meta(ge=0, description="Weight of the KL divergence to the base model, which costs a second forward pass."),
    ] = 0.0
    kl_estimator: Annotated[
        Literal["k1", "k2", "k3"],
        Meta(description="With kl_coef. k1: taken from the advantages; k2, k3: added to the loss."),
    ] = "k3"
    truth_tolerance: Annotated[
        float,
        Meta(
            ge=0,
            description="Largest mean absolute difference between recorded and recomputed logprobs; five times that "
            "for the 99th percentile in bfloat16, the same in float32. Beyond it the run stops and explains. 0: 0.001 "
            "in float32, 0.08 in bfloat16, far above the rounding that was measured.",
        ),
    ] = 0.0
    truth_samples: Annotated[
        int,
        Meta(
            ge=1,
            description="Pieces of sequences per step whose recorded policy is recomputed and compared. Each was "
            "sampled by one replica under one version; of each such pair there is at least one.",
        ),
    ] = 4

    def __post_init__(self) -> None:
        """Fill in the objective's defaults. Raises ValueError for a parameter that the objective does not use."""
        used = OBJECTIVES[self.objective]
        for name in (*PARAMETERS, "teacher"):
            if name not in used and getattr(self, name) is not None:
                known = ", ".join(sorted(used))
                raise ValueError(f"algorithm.{name} is not used by the objective {self.objective}, which has {known}")
        for name, default in used.items():
            if getattr(self, name) is None:
                value = "constant" if name == "normalisation" and self.advantage == "dr_grpo" else default
                msgspec.structs.force_setattr(self, name, value)
        if problem := self._problem():
            raise ValueError(problem)

    def _problem(self) -> str | None:
        """What contradicts itself, with the remedy."""
        if self.dual_clip and self.clip_high is not None and self.dual_clip <= 1 + self.clip_high:
            return f"algorithm.dual_clip: expected more than 1 + clip_high ({1 + self.clip_high:g}), or 0 for none"
        if self.ratio_min is not None and self.ratio_max is not None and self.ratio_min >= self.ratio_max:
            return f"algorithm.ratio_min: expected less than ratio_max ({self.ratio_max:g}), got {self.ratio_min:g}"
        if self.objective == "distillation" and not self.teacher:
            return 'algorithm.teacher: missing; the objective distillation needs one, such as teacher = "owner/name"'
        if self.kl_coef and self.kl_estimator == "k1" and self.objective in ("cross_entropy", "distillation"):
            return (
                f"algorithm.kl_estimator: k1 is taken from advantages, and {self.objective} uses none; write k2 or k3"
            )
        return None

    @property
    def parameters(self) -> dict[str, float | str]:
        """What the objective's function is called with."""
        return {name: getattr(self, name) for name in OBJECTIVES[self.objective] if name in PARAMETERS}

    @property
    def needs_signal(self) -> bool:
        """Whether a group whose rewards are all equal teaches nothing."""
        return self.objective != "distillation"


class OptimizerSection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """AdamW."""

    lr: Annotated[float, Meta(gt=0, description="Learning rate.")] = 1e-4
    warmup_steps: Annotated[int, Meta(ge=0, description="Steps over which the rate rises linearly from 0.")] = 0
    beta1: Annotated[float, Meta(ge=0, lt=1, description="AdamW's first beta.")] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1, description="AdamW's second beta.")] = 0.99
    weight_decay: Annotated[float, Meta(ge=0, description="AdamW's weight decay.")] = 0.0
    max_grad_norm: Annotated[float, Meta(gt=0, description="The gradient is scaled down to this norm.")] = 1.0
    token_budget: Annotated[
        int, Meta(ge=64, description="Tokens in one packed forward and backward pass; bounds memory.")
    ] = 2048
    gradient_checkpointing: Annotated[
        bool,
        Meta(description="Compute layers again for the backward pass: a third more work, for when memory runs out."),
    ] = False


class LoraSection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The adapter."""

    rank: Annotated[int, Meta(ge=1, le=512, description="LoRA rank.")] = 8
    alpha: Annotated[int, Meta(ge=1, description="LoRA alpha; the update is scaled by alpha / rank.")] = 16
    targets: Annotated[
        list[str], Meta(description="Module names that get an adapter. Empty: every linear layer but the head.")
    ] = []


class FleetSection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Who serves the run. Only `farflung up` heeds actors, routers, engine, engine_args and max_inflight."""

    name: Annotated[
        str,
        Meta(
            pattern="^([a-z0-9][a-z0-9-]{0,47})?$",
            description="Runs and replicas of one base model find each other by this name. Empty: from the model.",
        ),
    ] = ""
    actors: Annotated[int, Meta(ge=1, description="Actors that `farflung up` starts.")] = 1
    routers: Annotated[int, Meta(ge=1, description="Routers that `farflung up` starts.")] = 1
    engine: Annotated[
        Literal["embedded", "vllm"],
        Meta(description="The inference engine of the actors that `farflung up` starts: in their process, or vLLM."),
    ] = "embedded"
    engine_args: Annotated[
        list[str], Meta(description="Further flags for each vLLM server, such as --gpu-memory-utilization=0.5.")
    ] = []
    max_inflight: Annotated[int, Meta(ge=1, description="Episodes one actor runs at once.")] = 64
    min_replicas: Annotated[
        int, Meta(ge=1, description="A version is active only while at least this many replicas serve it.")
    ] = 1
    activation_timeout: Annotated[
        float, Meta(gt=0, description="Seconds a replica has to load a version before it is left behind.")
    ] = 120.0
    lease_seconds: Annotated[
        float,
        Meta(ge=1, description="A task runs elsewhere once its actor has given no sign of life for this many seconds."),
    ] = 30.0
    eval_slots: Annotated[
        NaturalNumber | None,
        Meta(
            description="Adapter slots kept for versions under evaluation: one for evaluation.source, more for "
            "`farflung eval`. Leave out: 1 with evaluation.source, else 0."
        ),
    ] = None


class StorageSection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """What is kept in the object store."""

    keep_groups_hours: Annotated[
        float, Meta(ge=0, description="Hours for which closed groups' trajectories are kept. 0: for ever.")
    ] = 168.0
    keep_versions: Annotated[
        int, Meta(ge=0, description="Newest versions whose adapters and checkpoints are kept. 0: all.")
    ] = 0
    grace_hours: Annotated[
        float,
        Meta(
            ge=0,
            description="Hours for which an object stays whatever else says that it may go: the message that names it "
            "may still be on its way.",
        ),
    ] = 24.0
    sweep_seconds: Annotated[
        float, Meta(ge=1, description="Seconds between two looks for objects that may be removed.")
    ] = 600.0


class ObservabilitySection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Where traces and metrics go."""

    otlp_endpoint: Annotated[
        str,
        Meta(
            description="OTLP/HTTP endpoint of the learner and of what `farflung up` starts, such as "
            "http://collector:4318. Empty: `farflung up` writes into the run directory."
        ),
    ] = ""
    trackers: Annotated[
        list[Literal["tensorboard", "wandb", "mlflow", "trackio"]],
        Meta(description="Also log each step's figures to these; each must be installed where the learner runs."),
    ] = []


class EvaluationSection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Held-out tasks that versions are evaluated on while training goes on."""

    source: Annotated[
        str, Meta(description="Where held-out tasks come from, named as tasks.source is. Empty: no evaluation.")
    ] = ""
    split: Annotated[str, Meta(description="Which split of a dataset directory.")] = "test"
    arguments: Annotated[
        dict[str, Any], Meta(description="Keyword arguments for the task source class, if source names one.")
    ] = {}
    every: Annotated[
        int,
        Meta(
            ge=1,
            description="Versions whose number is a multiple of this are evaluated, and the first and the last one. "
            "One that becomes due while another is evaluated takes the place of one that waits.",
        ),
    ] = 10
    samples: Annotated[int, Meta(ge=1, description="Completions per task; pass@k is known up to this k.")] = 1
    limit: Annotated[int, Meta(ge=0, description="Only the first so many tasks. 0: all.")] = 0
    success: Annotated[
        float, Meta(description="A completion whose reward is at least this counts as a success in pass@k.")
    ] = 1.0
    rewards: Annotated[
        list[str], Meta(description="Reward functions of evaluations. Empty: those of [environment], with its weights.")
    ] = []
    reward_weights: Annotated[
        list[float], Meta(description="One weight per function of evaluation.rewards. Empty: all 1.")
    ] = []
    max_new_tokens: Annotated[
        AtLeastOne | None, Meta(description="The longest reply, in tokens. Leave out: sampling.max_new_tokens.")
    ] = None
    temperature: Annotated[Temperature | None, Meta(description="0 is greedy. Leave out: sampling.temperature.")] = None
    top_p: Annotated[
        Probability | None,
        Meta(description="Sample from the likeliest tokens that have this probability together. Leave out: 1."),
    ] = None


class RunSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """One run, whole."""

    run: RunSection
    tasks: TasksSection
    environment: EnvironmentSection = msgspec.field(default_factory=EnvironmentSection)
    sampling: SamplingSection = msgspec.field(default_factory=SamplingSection)
    algorithm: AlgorithmSection = msgspec.field(default_factory=AlgorithmSection)
    optimizer: OptimizerSection = msgspec.field(default_factory=OptimizerSection)
    evaluation: EvaluationSection = msgspec.field(default_factory=EvaluationSection)
    lora: LoraSection = msgspec.field(default_factory=LoraSection)
    fleet: FleetSection = msgspec.field(default_factory=FleetSection)
    storage: StorageSection = msgspec.field(default_factory=StorageSection)
    observability: ObservabilitySection = msgspec.field(default_factory=ObservabilitySection)

    def __post_init__(self) -> None:
        """Fill in what one section takes from another. Raises ValueError for shaping over more than a completion."""
        self._fill_evaluation()
        algorithm = self.algorithm
        if algorithm.normalisation == "constant" and algorithm.normalisation_length is None:
            filled = msgspec.structs.replace(algorithm, normalisation_length=self.max_completion_tokens)
            msgspec.structs.force_setattr(self, "algorithm", filled)
        if algorithm.overlong_buffer > self.max_completion_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer: expected at most {self.max_completion_tokens}, the longest possible "
                f"completion, got {algorithm.overlong_buffer}"
            )

    def _fill_evaluation(self) -> None:
        section = self.evaluation
        filled = msgspec.structs.replace(
            section,
            max_new_tokens=section.max_new_tokens or self.sampling.max_new_tokens,
            temperature=self.sampling.temperature if section.temperature is None else section.temperature,
            top_p=1.0 if section.top_p is None else section.top_p,
        )
        msgspec.structs.force_setattr(self, "evaluation", filled)
        if self.fleet.eval_slots is None:
            fleet = msgspec.structs.replace(self.fleet, eval_slots=1 if section.source else 0)
            msgspec.structs.force_setattr(self, "fleet", fleet)

    @property
    def evaluation_tasks(self) -> TasksSection:
        """Where held-out tasks come from; they have the prompt column of the run's tasks."""
        return msgspec.structs.replace(
            self.tasks,
            source=self.evaluation.source,
            split=self.evaluation.split,
            arguments=self.evaluation.arguments,
            shuffle=False,
        )

    @property
    def evaluation_environment(self) -> EnvironmentSection:
        """How an episode of an evaluation goes, and what it is worth."""
        evaluation = self.evaluation
        if not evaluation.rewards:
            return self.environment
        return msgspec.structs.replace(
            self.environment, rewards=evaluation.rewards, reward_weights=evaluation.reward_weights
        )

    @property
    def user_code(self) -> list[str]:
        """The names of the user's code that runs on actors."""
        return list(dict.fromkeys([*self.environment.user_code, *self.evaluation.rewards]))

    @property
    def max_completion_tokens(self) -> int:
        """Tokens that an episode may sample at most."""
        turns = self.environment.max_turns if self.environment.environment else 1
        return self.sampling.max_new_tokens * turns

    @property
    def fleet_name(self) -> str:
        """The fleet's name, derived from the model's unless it is given."""
        return self.fleet.name or fleet_of(self.run.model)

    @property
    def min_group_size(self) -> int:
        """Good episodes a group needs to be trained on; at least two, or there is nothing to compare."""
        return self.algorithm.min_group_size or max(2, self.algorithm.group_size // 2)

    @property
    def adapter_slots(self) -> int:
        """Adapter slots this run needs on every replica: the max_staleness + 1 versions that may still be trained on,
        one being loaded, and those under evaluation.
        """
        return self.algorithm.max_staleness + 2 + (self.fleet.eval_slots or 0)


def fleet_of(model: str) -> str:
    """A fleet name from a model's name: its last part in lower-case letters, digits and dashes."""
    tail = model.rstrip("/").rsplit("/", 1)[-1].lower()
    name = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in tail).strip("-")
    return name[:48].strip("-") or "fleet"
