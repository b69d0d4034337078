"""Invalid recipes and overrides: one exact line for each mistake, before anything is started."""

from pathlib import Path

import pytest
from plasmid.plugins.registry import find_components, load_plugins

INSTALLED = {slot: ", ".join(sorted(kinds)) for slot, kinds in find_components(load_plugins()).items()}
"""Kinds that the messages list; further installed packages would add more."""
TABLES = (
    "algorithm, buffer, checkpoint, critic, data, eval, filters, model, placement, plugins, profiles, recipe, "
    "reference, reuse, rewards, rollout, run, sampling, teacher, trackers, trainer, workflow"
)
UNKNOWN = [
    ("trianer.lr=1", "trianer: no such setting; did you mean 'trainer'?"),
    ("zzz=1", f"zzz: no such setting; settings here are {TABLES}"),
    ("run.batch=3", "run.batch: no such setting; did you mean 'batches'?"),
    ("model.pathh='x'", "model.pathh: no such setting; did you mean 'path'?"),
    ("checkpoint.evry=2", "checkpoint.evry: no such setting; did you mean 'every'?"),
    ("reference.pth='x'", "reference.pth: no such setting; did you mean 'path'?"),
    ("sampling.tempreature=1", "sampling.tempreature: no such setting; did you mean 'temperature'?"),
    ("trainer.lrr=1", "trainer.lrr: no such setting; did you mean 'lr'?"),
    ("algorithm.clip=1", "algorithm.clip: no such setting; did you mean 'clip_low'?"),
    ("rollout.max_bach=1", "rollout.max_bach: no such setting; did you mean 'max_batch'?"),
    ("data.promt_key='x'", "data.promt_key: no such setting; did you mean 'prompt_key'?"),
    ("workflow.turns=2", "workflow.turns: no such setting; settings here are kind"),
    ("rewards.0.pik='last'", "rewards.0.pik: no such setting; did you mean 'pick'?"),
    ("trackers=[{kind='tensorboard', flush=1}]", "trackers.0.flush: no such setting; did you mean 'flush_s'?"),
    ("eval.0.nam='x'", "eval.0.nam: no such setting; did you mean 'name'?"),
    ("eval.0.data.pth='x'", "eval.0.data.pth: no such setting; did you mean 'path'?"),
    ("eval.0.sampling={temprature=1}", "eval.0.sampling.temprature: no such setting; did you mean 'temperature'?"),
]
TYPES = [
    ("run.batches='many'", "run.batches: must be an integer of at least 1, got 'many'"),
    ("run.batches='5'", "run.batches: must be an integer of at least 1, got '5'"),
    ("run.batches=2.5", "run.batches: must be an integer of at least 1, got 2.5"),
    ("run.batches=true", "run.batches: must be an integer of at least 1, got True"),
    ("run.batches=", "run.batches: must be an integer of at least 1, got ''"),
    ("run.batches=1979-05-27", "run.batches: must be an integer of at least 1, got datetime.date(1979, 5, 27)"),
    ("run.batches.x=1", "run.batches: must be an integer of at least 1, got {'x': 1}"),
    ("trainer.lr==1", "trainer.lr: must be a number of at least 0, got '=1'"),
    ("trainer.lr=true", "trainer.lr: must be a number of at least 0, got True"),
    ("trainer.nesterov=1", "trainer.nesterov: must be true or false, got 1"),
    ("trainer.nesterov='yes'", "trainer.nesterov: must be true or false, got 'yes'"),
    ("trainer.betas=[0.9]", "trainer.betas: must be a list of 2, got [0.9]"),
    ("trainer.betas=[0.9,'x']", "trainer.betas.1: must be a number, got 'x'"),
    ("model.path=3", "model.path: must be a string, got 3"),
    ("model='x'", "model: must be a table, got 'x'"),
    ("model=[{path='x'}]", "model: must be a table, got [{'path': 'x'}]"),
    ("run=3", "run: must be a table, got 3"),
    ("eval.0.sampling=3", "eval.0.sampling: must be a table, got 3"),
    ("data.template='x'", "data.template: must be a table, got 'x'"),
    ("trainer='fsdp'", "trainer: must be a table with a kind, got 'fsdp'"),
    ("rewards={kind='number'}", "rewards: must be a list of tables ([[rewards]]), got {'kind': 'number'}"),
    ("rewards=['number']", "rewards.0: must be a table with a kind, got 'number'"),
    ("eval={name='x'}", "eval: must be a list of tables ([[eval]]), got {'name': 'x'}"),
    ("eval=[3]", "eval.0: must be a table, got 3"),
    ("plugins='x.py'", "plugins: must be a list of file names, got 'x.py'"),
    ("sampling.stop='x'", "sampling.stop: must be a list of strings, got 'x'"),
    ("sampling.stop=[1]", "sampling.stop.0: must be a string, got 1"),
    ("placement.device='gpu'", "placement.device: must be 'auto', 'cpu' or 'cuda', got 'gpu'"),
    ("rollout.dtype='fp8'", "rollout.dtype: must be 'auto', 'float32' or 'bfloat16', got 'fp8'"),
    ("model.max_length='long'", "model.max_length: must be 'auto' or an integer of at least 1, got 'long'"),
    ("sampling.top_k='none'", "sampling.top_k: must be 'all' or an integer, got 'none'"),
    ("placement.threads='all'", "placement.threads: must be 'auto' or an integer of at least 1, got 'all'"),
    ("eval.0.limit=2.5", "eval.0.limit: must be 'all' or an integer of at least 1, got 2.5"),
    ("data.path=3", "data.path: must be a string or a list of strings, got 3"),
    ("data.path=[1]", "data.path.0: must be a string, got 1"),
    ("data.epochs='forever'", "data.epochs: must be 'endless' or an integer, got 'forever'"),
    ("algorithm.dual_clip='on'", "algorithm.dual_clip: must be 'off' or a number above 1, got 'on'"),
    ("trainer.microbatch_samples=true", "trainer.microbatch_samples: must be 'auto' or an integer, got True"),
]
RANGES = [
    ("run.batches=0", "run.batches: must be at least 1, got 0"),
    ("run.seed=-1", "run.seed: must be at least 0, got -1"),
    ("run.max_failed=2", "run.max_failed: must be at most 1, got 2"),
    ("run.rollout_timeout_s=inf", "run.rollout_timeout_s: must be a finite number, got inf"),
    ("trainer.lr=nan", "trainer.lr: must be a finite number, got nan"),
    ("trainer.lr=-1", "trainer.lr: must be at least 0, got -1"),
    ("trainer.betas=[0.9,1.5]", "trainer.betas: both must be at least 0 and below 1, got [0.9, 1.5]"),
    ("rewards.0.weight=nan", "rewards.0.weight: must be a finite number, got nan"),
    ("rewards.0.timeout_s=0", "rewards.0.timeout_s: must be more than 0, got 0"),
    ("sampling.temperature=-1", "sampling.temperature: must be at least 0, got -1"),
    ("sampling.top_p=0", "sampling.top_p: must be more than 0, got 0"),
    ("sampling.top_k=0", "sampling: top_k must be 'all' or at least 1, got 0"),
    ("sampling.max_new_tokens=0", "sampling.max_new_tokens: must be at least 1, got 0"),
    ("model.max_length=0", "model.max_length: must be 'auto' or an integer of at least 1, got 0"),
    ("placement.threads=0", "placement.threads: must be 'auto' or an integer of at least 1, got 0"),
    ("algorithm.dual_clip=inf", "algorithm.dual_clip: must be 'off' or a number above 1, and finite, got inf"),
    ("data.epochs=0", "data: epochs must be 'endless' or at least 1, got 0"),
    ("eval.0.name='a b'", "eval.0.name: must match pattern '^[A-Za-z0-9_.-]+$', got 'a b'"),
    (
        "rewards=[{kind='regex',pattern='('}]",
        "rewards.0.pattern: '(' is not a valid regular expression: missing ) at position 1",
    ),
    ("rewards=[{kind='format',tags=[]}]", "rewards.0.tags: must have at least 1 item, got []"),
]
KIND_MISTAKES = [
    ("trainer.kind='zzz'", f"trainer.kind: 'zzz' is not installed; installed are {INSTALLED['trainer']}"),
    ("trainer.kind='fspd'", "trainer.kind: 'fspd' is not installed; did you mean 'fsdp'?"),
    ("trainer.kind=3", f"trainer.kind: must be a string, got 3; installed are {INSTALLED['trainer']}"),
    ("rollout.kind='zzz'", f"rollout.kind: 'zzz' is not installed; installed are {INSTALLED['rollout']}"),
    ("algorithm.kind='grpoo'", "algorithm.kind: 'grpoo' is not installed; did you mean 'grpo'?"),
    ("workflow.kind='single-tunr'", "workflow.kind: 'single-tunr' is not installed; did you mean 'single-turn'?"),
    ("rewards=[{}]", f"rewards.0.kind: is missing; installed are {INSTALLED['rewards']}"),
    ("rewards=[{kind='nubmer'}]", "rewards.0.kind: 'nubmer' is not installed; did you mean 'number'?"),
    ("rewards=[{kind='regex'}]", "rewards.0.pattern: is required"),
    ("eval.0.data.kind='x'", f"eval.0.data.kind: 'x' is not installed; installed are {INSTALLED['data']}"),
]
OVERRIDES = [
    *(
        (text, f"override {text!r} must look like key=value, for example trainer.lr=1e-6")
        for text in ("trainer.lr", "=3", "a..b=1", ".a=1", "a.=1")
    ),
    ("rewards.5.weight=1", "rewards.5: no such item; rewards has 1, counted from 0"),
    ("rewards.x.weight=1", "rewards: must be a list of tables ([[rewards]]), got {'x': {'weight': 1}}"),
]
NO_KL = "has no effect, because there is no KL; remove it, or set kl_coef or monitor_kl"
TOGETHER = [
    (
        ["run.steps_per_batch=3"],
        "run.steps_per_batch: must divide the 16 rollouts of a batch (prompts_per_batch x samples_per_prompt), got 3",
    ),
    (
        ["run.steps_per_batch=8", "placement.trainer_ranks=3"],
        "run.prompts_per_batch: 2 rollouts per step are fewer than placement.trainer_ranks = 3; "
        "each rank needs at least one",
    ),
    (
        ["checkpoint.every=3", "run.sync_every=2"],
        "checkpoint.every: must be a multiple of run.sync_every = 2, got 3: between syncs trainer and engine have "
        "different policies, which a checkpoint cannot restore",
    ),
    (
        ["run.over_sampling=2.0", "run.max_staleness=1"],
        'run.over_sampling: must be 1 with buffer.when_stale = "wait", which drops no groups, got 2: the surplus would '
        'exceed run.max_staleness; lower it, or set when_stale to "drop" or "resample"',
    ),
    (["run.over_sampling=2.0"], "run.over_sampling: has no effect with max_staleness = 0, where no surplus is kept"),
    (["eval.0.pass_at=[1,4]"], "eval.0: pass_at: k must be in 1..1 (samples_per_prompt), got 4"),
    (
        ["eval=[{name='a',data={path='p'}},{name='a',data={path='p'}}]"],
        "eval: 2 sets are named 'a'; names must be unique",
    ),
    (["rewards=[]"], "rewards: algorithm 'grpo' needs at least one reward; add a [[rewards]] table"),
    (["algorithm.kl_estimator='k1'"], f"algorithm: kl_estimator = 'k1' {NO_KL}"),
    (["algorithm.unbiased_kl=true"], f"algorithm: unbiased_kl = True {NO_KL}"),
    (
        ["algorithm.constant_length=5"],
        'algorithm: constant_length = 5 has no effect; remove it or set reduction = "constant"',
    ),
    (
        ["algorithm.reduction='constant'"],
        'algorithm: reduction = "constant" divides by constant_length; set it, for example to 1024',
    ),
    (
        ["algorithm.normalize_std=false", "algorithm.std_eps=0.1"],
        "algorithm: std_eps = 0.1 has no effect with normalize_std = false; remove it",
    ),
    (["reference.path='model'"], "reference: algorithm 'grpo' with these settings never reads it; remove the table"),
    (["reference.update_every=2"], "reference: algorithm 'grpo' with these settings never reads it; remove the table"),
    (
        ["algorithm.kl_coef=0.1", "reference.update_every=2", "trainer.kind='fsdp'", "trainer.lora.rank=4"],
        "reference.update_every: must be 0 for a trainer with an adapter, got 2: the reference is the frozen "
        "base model, which cannot be replaced; remove it",
    ),
    (
        ["placement.reference_ranks=1"],
        "placement.reference_ranks: 1 has no effect, because algorithm 'grpo' with these settings loads no reference; "
        "remove it",
    ),
    (
        ["algorithm.kl_coef=0.1", "placement.reference_ranks=500", "trainer.kind='fsdp'"],
        "run.prompts_per_batch: 16 rollouts per step are fewer than placement.reference_ranks = 500; each rank needs "
        "at least one",
    ),
    (
        ["placement.critic_ranks=1"],
        "placement.critic_ranks: 1 has no effect, because algorithm 'grpo' with these settings loads no critic; "
        "remove it",
    ),
    (
        ["algorithm.kind='ppo'", "placement.critic_ranks=500", "trainer.kind='fsdp'"],
        "run.prompts_per_batch: 16 rollouts per step are fewer than placement.critic_ranks = 500; each rank needs "
        "at least one",
    ),
    (["critic.path='model'"], "critic: algorithm 'grpo' with these settings never reads it; remove the table"),
    (["teacher={path='x'}"], "teacher: algorithm 'grpo' with these settings never reads it; remove the table"),
    (
        ["placement.offload_trainer=true"],
        "placement: offload_trainer and offload_engine have no effect without colocated = true; set it, or remove them",
    ),
    (["trainer.optimizer='sgd'", "trainer.eps=0.1"], "trainer: eps has no effect with optimizer = 'sgd'; remove it"),
    (
        ["trainer.decay_steps=5"],
        "trainer: decay_steps has no effect with schedule = 'constant'; remove it or change schedule",
    ),
    (
        ["checkpoint.keep_every=3"],
        "checkpoint: keep_every = 3 has no effect with every = 0, which only saves at the end; remove it",
    ),
    (
        ["checkpoint.every=2", "checkpoint.keep_every=3"],
        "checkpoint: keep_every must be a multiple of every = 2, got 3",
    ),
    (
        ["eval.0.pass_threshold=0.5"],
        "eval.0: pass_threshold = 0.5 has no effect without pass_at; remove it, or set pass_at",
    ),
    (
        ["algorithm.kind='ppo'", "algorithm.critic_warmup=4"],
        "algorithm.critic_warmup: must be less than run.batches = 4, got 4: no batch would train the policy",
    ),
    (["rewards.0.weight=0"], "rewards: at least one must have a weight other than 0; set weight"),
    (["sampling.stop=['']"], "sampling: stop contains an empty string, which would end every completion; remove it"),
    (["sampling.stop_token_ids=[-1]"], "sampling: stop_token_ids must be at least 0, got -1"),
    (
        ["reuse.groups_per_batch=9", "reuse.capacity=2", "algorithm.old_policy='rollout'"],
        "reuse: groups_per_batch must be at most capacity = 2, got 9",
    ),
    (
        ["run.max_staleness=1", "buffer={kind='priority',arguments={a=1}}"],
        "buffer: arguments has no effect with by = 'reward-spread'; remove it",
    ),
    (["data.too_long='drop'"], "data: too_long = 'drop' has no effect without max_prompt_tokens"),
    (
        ["rewards=[{kind='length',max_tokens=3,slope_tokens=5}]"],
        "rewards.0: slope_tokens must be at most max_tokens = 3, got 5",
    ),
    (
        ["filters=[{kind='reward-range',low=1,high=0}]"],
        "filters.0: low = 1 is above high = 0; every group would be dropped",
    ),
]


@pytest.mark.parametrize(("override", "message"), [*UNKNOWN, *TYPES, *RANGES, *KIND_MISTAKES, *OVERRIDES])
def test_errors_of_invalid_settings_name_the_fix(rl, override, message):
    assert rl("train", "recipe.toml", override) == [message]


@pytest.mark.parametrize(("overrides", "message"), TOGETHER, ids=lambda value: str(value)[:60])
def test_settings_that_do_not_fit_together_are_named(rl, overrides, message):
    assert rl("train", "recipe.toml", *overrides) == [message]


def test_the_recipe_of_these_tests_is_good(folder, capsys):
    from plasmid_cli.main import app

    with pytest.raises(SystemExit) as stopped:
        app(["train", "recipe.toml", "--dry-run"])
    assert not stopped.value.code
    assert capsys.readouterr().err == ""


def test_mistakes_in_different_tables_are_all_reported_and_none_twice(rl):
    overrides = ["run.batches=0", "run.seed='x'", "trainer.lr=-1", "rewards.0.pik=1", "data.pth='x'", "zzz=1"]
    assert rl("train", "recipe.toml", *overrides, "eval.0.data.kind='x'", "eval.0.limit=0", "model.max_length='x'") == [
        "data.pth: no such setting; did you mean 'path'?",
        "trainer.lr: must be at least 0, got -1",
        "rewards.0.pik: no such setting; did you mean 'pick'?",
        f"eval.0.data.kind: 'x' is not installed; installed are {INSTALLED['data']}",
        "eval.0.limit: must be 'all' or an integer of at least 1, got 0",
        "model.max_length: must be 'auto' or an integer of at least 1, got 'x'",
        "run.seed: must be an integer of at least 0, got 'x'",
        "run.batches: must be at least 1, got 0",
        f"zzz: no such setting; settings here are {TABLES}",
    ]


def test_conflicting_settings_of_one_table_are_all_reported(rl):
    trainer = ("microbatch_samples=0", "microbatch_tokens=10", "decay_steps=5", "momentum=0.9", "nesterov=true")
    algorithm = ("kl_estimator='k1'", "unbiased_kl=true", "reward_kl_estimator='k2'", "constant_length=5")
    std = ("normalize_std=false", "std_eps=0.1", "std_form='population'", "correction.mode='mask'")
    changes = [*(f"trainer.{one}" for one in trainer), *(f"algorithm.{one}" for one in (*algorithm, *std))]
    assert sorted(rl("train", "recipe.toml", *changes)) == [
        'algorithm: constant_length = 5 has no effect; remove it or set reduction = "constant"',
        "algorithm: correction has no effect with old_policy = 'trainer'; remove it, or set it to \"decoupled\"",
        f"algorithm: kl_estimator = 'k1' {NO_KL}",
        "algorithm: reward_kl_estimator = 'k2' has no effect, because there is no KL in the reward; remove it, or set "
        "reward_kl_coef",
        "algorithm: std_eps = 0.1 has no effect with normalize_std = false; remove it",
        "algorithm: std_form = 'population' has no effect with normalize_std = false; remove it",
        f"algorithm: unbiased_kl = True {NO_KL}",
        "trainer: decay_steps has no effect with schedule = 'constant'; remove it or change schedule",
        "trainer: microbatch_samples must be 'auto' or at least 1, got 0",
        "trainer: microbatch_tokens has no effect if microbatch_samples is set; remove one of them",
        "trainer: momentum has no effect with optimizer = 'adamw'; remove it",
        "trainer: nesterov has no effect with optimizer = 'adamw'; remove it",
    ]


def test_errors_of_checks_across_tables_are_all_reported(rl):
    assert rl("train", "recipe.toml", "run.steps_per_batch=3", "run.over_sampling=2.0", "rewards=[]") == [
        "rewards: algorithm 'grpo' needs at least one reward; add a [[rewards]] table",
        "run.steps_per_batch: must divide the 16 rollouts of a batch (prompts_per_batch x samples_per_prompt), got 3",
        "run.over_sampling: has no effect with max_staleness = 0, where no surplus is kept",
    ]


def test_all_missing_tables_of_an_empty_recipe_are_reported(rl, folder):
    (folder / "empty.toml").write_text("")
    assert rl("train", "empty.toml") == [
        "data.path: is required",
        f"trainer.kind: is missing; installed are {INSTALLED['trainer']}",
        f"algorithm.kind: is missing; installed are {INSTALLED['algorithm']}",
        "model.path: is required",
    ]


def test_the_error_for_a_recipe_without_an_engine_names_the_fix(rl, folder):
    recipe = (folder / "recipe.toml").read_text().replace('[rollout]\nkind = "hf"\n', "")
    (folder / "recipe.toml").write_text(recipe)
    expected = "rollout: algorithm 'grpo' needs an engine; add a [rollout] table, for example kind = \"hf\""
    assert rl("train", "recipe.toml") == [expected]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[run\nbatches=1\n", "Expected ']' at the end of a table declaration (at line 1, column 5)"),
        (b"a = 1\nb = \n", "Invalid value (at line 2, column 5)"),
        (b"a = 1\na = 2\n", "Cannot overwrite a value (at line 2, column 6)"),
        (b"\xff\xfe", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    ],
)
def test_a_recipe_that_is_no_toml_is_named_with_the_line(rl, folder, content, message):
    (folder / "bad.toml").write_bytes(content)
    assert rl("train", "bad.toml") == [f"bad.toml: not valid TOML: {message}"]


def test_a_recipe_that_cannot_be_read_is_named(rl, folder):
    (folder / "dir.toml").mkdir()
    (folder / "recipe.txt").write_text("")
    assert rl("train", "dir.toml") == ["dir.toml: cannot read the recipe: is a directory"]
    assert rl("train", "no.toml") == ["no.toml: cannot read the recipe: no such file or directory"]
    (folder / "notes.md").write_text("")
    misnamed = "not a recipe; its name must end in .toml"
    assert rl("train", "recipe.txt") == [f"recipe.txt: {misnamed}; did you mean recipe.toml?"]
    assert rl("train", "notes.md") == [f"notes.md: {misnamed}"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("train", "missing argument 'RECIPE|KEY=VALUE'; see `rl train --help`"),
        ("train recipe.toml --foo", "no such option: --foo; see `rl train --help`"),
        ("trian", "no such command 'trian'; did you mean 'train'; see `rl --help`"),
        ("convert x", "missing argument 'TARGET'; see `rl convert --help`"),
        ("options a b", "got unexpected extra argument(s) (b); see `rl options --help`"),
        ("train run.batches=3", "no recipe given; add a TOML file, for example recipes/smollm2-sums-cpu.toml"),
        ("train recipe.toml --replay x --resume", "--replay: always starts a new run; remove --resume"),
        ("options zzz", "no component or table 'zzz'; `rl options` lists all"),
        ("options fsdb", "no component or table 'fsdb'; did you mean 'fsdp'?"),
        ("eval recipe.toml eval=[]", "eval: the recipe has no evaluation set; add an [[eval]] table"),
        (
            "eval recipe.toml --model no/such",
            "model.path: no such folder: no/such, and the Hugging Face cache has no such model; download it: "
            "hf download no/such",
        ),
        (
            "eval recipe.toml --model nope",
            "--model nope: no such folder; give a model folder, a run folder or a checkpoint",
        ),
        ("eval --model nope", "--model nope: no such folder; give a model folder, a run folder or a checkpoint"),
        ("convert no/such out", "no/such: no such file or folder"),
        ("convert x out --from zzz", f"--from: no layout 'zzz'; installed are {INSTALLED['converters']}"),
        ("convert x out --from hf from.dtypes=1", "from.dtypes: no such setting; did you mean 'dtype'?"),
        ("view no", "no: not a run: it has no config.json and no metrics.jsonl; give the folder of a run"),
    ],
)
def test_a_command_line_that_cannot_be_meant_is_one_line(rl, argv, message):
    assert [line.replace(str(Path.cwd()), "HERE") for line in rl(*argv.split())] == [message]


@pytest.mark.parametrize("command", [("eval",), ("sample", "--eval", "test")])
@pytest.mark.parametrize("override", ["sampling.temperature=0", "sampling={temperature=0}"])
def test_sampling_of_the_command_line_that_an_evaluation_set_hides_is_refused(rl, command, override):
    own = "eval.0.sampling={temperature=0.7, max_new_tokens=5}"
    assert rl(*command, "recipe.toml", own, override) == [
        "eval.0.sampling.temperature: is 0.7, which overrides sampling.temperature of the command line; set "
        "eval.0.sampling.temperature on the command line"
    ]
