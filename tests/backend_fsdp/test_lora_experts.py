"""Adapters of routed experts: one pair of matrices per expert and projection, trained as the merged weights say."""

import asyncio
import json

import pytest
import torch
from fsdp_cases import fit, largest_difference, make_batch, plain_logprobs, weights_of, whole_rows
from megatron_families import make_family
from plasmid.components import AdapterSpec
from plasmid.errors import ModelError
from plasmid_models.lora.experts import grouped_linear
from plasmid_models.lora.insertion import adapter_pieces, folder_layers, insert_adapter
from plasmid_models.testing import make_tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

EXPERTS = r"experts\.\d+\.(gate|up|down)_proj"
LORA = {"rank": 4, "alpha": 6.0, "targets": [EXPERTS, "q_proj"]}
SGD = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9}
TWO = [make_batch(num_groups=2), make_batch(seed=1, num_groups=2, steps=2, index=1)]
IDS = torch.randint(7, 50, (2, 5), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Two ranks share five experts."""
    return make_family(tmp_path_factory.mktemp("mixture") / "model", "Qwen3-MoE", num_experts=5)


def load(path, dtype=torch.float64):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager").eval()


def merged_weights(lm, matrices, scale):
    """The parameters of transformers' model with ``W_e + scale * B_e A_e`` for every expert e, in a plain loop."""
    whole = dict(lm.named_parameters())
    for name in {name.rpartition(".lora_")[0] for name in matrices}:
        product = scale * matrices[f"{name}.lora_B"] @ matrices[f"{name}.lora_A"]
        if ".experts." not in name:
            whole[f"{name}.weight"] = whole[f"{name}.weight"] + product
            continue
        start, _, rest = name.partition(".experts.")
        number, kind = rest.split(".")
        fused = f"{start}.experts.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}"
        rows = {"down_proj": slice(None), "gate_proj": slice(0, 32), "up_proj": slice(32, 64)}[kind]
        added = torch.zeros_like(whole[fused])
        added[int(number), rows] = 1.0
        shape = whole[fused][0, rows].shape
        assert product.shape == shape
        whole[fused] = whole[fused] + added * place(product, rows, whole[fused].shape[1])
    return whole


def place(product, rows, height):
    """The product in its rows of a fused matrix."""
    before = rows.start or 0
    return torch.nn.functional.pad(product, (0, 0, before, height - before - len(product)))


FAMILIES = ["Qwen3-MoE", "GLM-4.5", "DeepSeek-V3"]
CASES = [(family, torch.float64, 3, {}) for family in FAMILIES]
CASES += [("Qwen3-MoE", torch.float32, rank, {}) for rank in (4, 3)]
CASES += [("Qwen3-MoE", torch.float32, 4, {"num_experts": 12, "num_experts_per_tok": 1})]


@pytest.mark.parametrize(("family", "dtype", "rank", "config"), CASES, ids=str)
def test_scores_and_gradients_are_those_of_merged_weights_in_fp64(family, dtype, rank, config, tmp_path):
    """Experts are computed one by one in fp64 or with rank 3, together with rank 4 in fp32, some without tokens."""
    model = make_family(tmp_path / "model", family, **config)
    lm, plain = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval().requires_grad_(False), load(model)
    spec = AdapterSpec(rank=rank, alpha=6.0, targets=(EXPERTS, "o_proj"))
    layers, draw, matrices = insert_adapter(lm, spec, dtype=dtype), torch.Generator().manual_seed(0), {}
    pieces = adapter_pieces(layers)
    for name, layer in layers.items():
        for kind, std in (("lora_A", 1.0), ("lora_B", 0.1)):
            tensor = getattr(layer, kind).data.normal_(std=std, generator=draw)
            for piece in pieces.get(f"{name}.{kind}", ()):
                matrices[piece.name] = piece.of(tensor).double().requires_grad_()
            if not pieces.get(f"{name}.{kind}"):
                matrices[f"{name}.{kind}"] = tensor.double().requires_grad_()
    assert {name.rpartition(".")[0] for name in matrices} == set(folder_layers(layers))
    expected = torch.func.functional_call(plain, merged_weights(plain, matrices, 6.0 / rank), kwargs={"input_ids": IDS})
    found, limit = lm(IDS), 1e-10 if dtype == torch.float64 else 2e-5
    assert float((found.logits - expected.logits).detach().abs().max()) < limit
    assert float((found.logits - plain(IDS).logits).detach().abs().max()) > 0.05
    for output in (found, expected):
        output.logits.log_softmax(-1)[..., 7].sum().backward()
    for name, layer in layers.items():
        for kind in ("lora_A", "lora_B"):
            gradient = getattr(layer, kind).grad
            own = {p.name: p.of(gradient) for p in pieces.get(f"{name}.{kind}", ())} or {f"{name}.{kind}": gradient}
            for one, ours in own.items():
                theirs = matrices[one].grad
                assert float((ours - theirs).abs().max()) < limit * max(1.0, float(theirs.abs().max())), one
    assert all(p.grad is None for name, p in lm.named_parameters() if "lora" not in name)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 8), (torch.float32, 6), (torch.float64, 8)], ids=str)
def test_grouped_products_are_those_of_single_experts(dtype, size):
    x, weight = torch.randn(9, size, dtype=dtype), torch.randn(4, 8, size, dtype=dtype)
    expected = torch.cat([x[:3] @ weight[0].T, x[3:8] @ weight[2].T, x[8:] @ weight[3].T])
    found = grouped_linear(x, weight, torch.tensor([3, 3, 8, 9], dtype=torch.int32))
    torch.testing.assert_close(found, expected)


def train(ranks, model, path, trainer=SGD, *, lora=LORA, batches=TWO, algorithm=None):
    """Metrics of every step, the merged weights, and the adapter's tensors afterwards."""

    async def run():
        handle, config = await ranks.start(model=model, trainer=trainer | {"lora": lora}, algorithm=algorithm)
        reports = await fit(handle, config, *batches)
        return reports, await weights_of(handle, path)

    reports, weights = asyncio.run(run())
    return reports, weights, adapter_of(path)


def adapter_of(path):
    tensors = load_file(path.with_name(f"{path.name}-adapter") / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model.").removesuffix(".weight"): one for name, one in tensors.items()}


def test_the_first_step_equals_that_of_a_plain_loop(one_rank, mixture, tmp_path):
    """The matrices drawn by the trainer, trained by PyTorch on merged weights in fp64."""
    _, _, first = train(one_rank, mixture, tmp_path / "start", batches=[])
    assert all(not tensor.any() for name, tensor in first.items() if name.endswith("lora_B"))
    trained = {name: tensor.double().requires_grad_() for name, tensor in first.items()}
    base, batch = load(mixture), make_batch()
    whole = merged_weights(base, trained, 1.5)
    rows, loss = whole_rows(batch), 0.0
    model = lambda **kwargs: torch.func.functional_call(base, whole, kwargs=kwargs)  # noqa: E731
    for i, logprobs in enumerate(plain_logprobs(model, rows)):
        group, of_group = batch.groups[i // 4], i % 4
        advantage = (group.rewards - group.rewards.mean())[of_group] / (group.rewards.std(ddof=1) + 1e-6)
        mask = torch.from_numpy(rows.loss_mask[rows.offsets[i] : rows.offsets[i + 1]])
        loss = loss - ((logprobs - logprobs.detach()).exp() * advantage)[mask].mean() / rows.num_samples
    loss.backward()
    norm = float(torch.nn.utils.get_total_norm([tensor.grad for tensor in trained.values()]))
    reports, _, adapter = train(
        one_rank, mixture, tmp_path / "out", {"optimizer": "sgd", "lr": 0.1, "momentum": 0.0}, batches=[batch]
    )
    assert reports[0]["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, tensor in trained.items():
        assert torch.allclose(adapter[name], (tensor.detach() - 0.1 * tensor.grad).float(), atol=1e-6), name


@pytest.mark.parametrize(
    "split",
    [pytest.param({}, marks=pytest.mark.long), {"microbatch_tokens": 40, "activation_checkpointing": True}],
    ids=str,
)
def test_two_ranks_compute_what_one_computes(split, one_rank, two_ranks, mixture, tmp_path):
    algorithm = {"kl_coef": 0.1}
    expected, weights, adapter = train(one_rank, mixture, tmp_path / "one", algorithm=algorithm)
    reports, own_weights, own_adapter = train(two_ranks, mixture, tmp_path / "two", SGD | split, algorithm=algorithm)
    assert expected[0]["train/kl"] == 0 < expected[-1]["train/kl"]
    for ours, theirs in zip(reports, expected, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/kl"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6)
    assert largest_difference(own_weights, weights) < 1e-6
    assert largest_difference(own_adapter, adapter) < 1e-6


def test_the_reference_is_the_base_without_a_copy(one_rank, mixture, tmp_path, monkeypatch):
    from plasmid_training.rank import frozen

    for kept in ("HostWeights", "SecondModel"):
        monkeypatch.setattr(frozen, kept, None)
    last = make_batch(seed=2, index=2)

    async def run():
        handle, config = await one_rank.start(
            model=mixture,
            trainer=SGD | {"lora": LORA},
            algorithm={"kl_coef": 0.1, "kl_estimator": "k1", "reduction": "per-token"},
        )
        await fit(handle, config, *TWO)
        await weights_of(handle, tmp_path / "out")
        return await fit(handle, config, last)

    (report,) = asyncio.run(run())
    rows = whole_rows(last)
    with torch.no_grad():
        policy, base = (torch.cat(plain_logprobs(load(path), rows)) for path in (tmp_path / "out", mixture))
    apart = (policy - base)[torch.from_numpy(rows.loss_mask)].mean()
    assert abs(apart) > 1e-4
    assert report["train/kl"] == pytest.approx(float(apart), abs=1e-5)


def test_exports_are_the_base_and_the_product_of_each_expert(one_rank, mixture, tmp_path):
    lora = LORA | {"targets": [r"layers\.1\.mlp\.experts\.\d+\.(up|down)_proj"]}
    _, weights, adapter = train(one_rank, mixture, tmp_path / "out", lora=lora)
    base = load_file(mixture / "model.safetensors")
    changed = {name.removesuffix(".weight") for name in weights if not torch.equal(weights[name], base[name])}
    layers = {f"model.layers.1.mlp.experts.{e}.{kind}" for e in range(5) for kind in ("up_proj", "down_proj")}
    assert changed == layers == {name.rpartition(".")[0] for name in adapter}
    for name in layers:
        product = adapter[f"{name}.lora_B"] @ adapter[f"{name}.lora_A"]
        assert torch.allclose(weights[f"{name}.weight"], base[f"{name}.weight"] + 1.5 * product, atol=1e-7)
    config = json.loads((tmp_path / "out-adapter/adapter_config.json").read_text())
    assert config["target_modules"] == sorted(layers) and config["r"] == 4


@pytest.mark.parametrize("kind", ["two_ranks", pytest.param("one_rank", marks=pytest.mark.long)])
def test_an_exported_adapter_can_be_started_from(kind, one_rank, mixture, request, tmp_path):
    _, weights, adapter = train(one_rank, mixture, tmp_path / "first")
    config = json.loads((tmp_path / "first-adapter/adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "gate_proj", "q_proj", "up_proj"]
    lora = LORA | {"start_from": str(tmp_path / "first-adapter")}
    _, again, own = train(request.getfixturevalue(kind), mixture, tmp_path / "again", lora=lora, batches=[])
    assert largest_difference(again, weights) == 0 and largest_difference(own, adapter) == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("one_rank", "one_rank"),
        ("two_ranks", "one_rank"),
        pytest.param("two_ranks", "two_ranks", marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_continues(before, after, mixture, request, tmp_path):
    settings = {"trainer": {"lr": 1e-2, "eps": 1e-3, "lora": LORA}, "model": mixture}
    more = [make_batch(seed=i, index=i) for i in range(2, 4)]

    async def run():
        handle, config = await request.getfixturevalue(before).start(**settings)
        await fit(handle, config, *TWO)
        await handle.save(tmp_path / "saved")
        whole = await fit(handle, config, *more), await weights_of(handle, tmp_path / "a")
        handle, config = await request.getfixturevalue(after).start(**settings)
        await handle.load(tmp_path / "saved")
        return whole, (await fit(handle, config, *more), await weights_of(handle, tmp_path / "b"))

    (expected, weights), (reports, again) = asyncio.run(run())
    if before == after:
        assert reports == expected and largest_difference(again, weights) == 0
    assert largest_difference(again, weights) < 2e-6


def test_adapters_of_some_experts_or_of_transposed_ones_are_refused(one_rank, mixture, tmp_path):
    def error(model, *targets):
        with pytest.raises(ModelError) as found:
            asyncio.run(one_rank.start(model=model, trainer={"lora": LORA | {"targets": targets}}))
        return str(found.value)

    assert error(mixture, r"experts\.[12]\.down_proj") == (
        "trainer.lora.targets: must match all experts of a layer or none, but do not match "
        "model.layers.0.mlp.experts.0.down_proj, model.layers.0.mlp.experts.3.down_proj, "
        "model.layers.0.mlp.experts.4.down_proj"
    )
    oss = make_tiny_model(tmp_path / "oss", family="gpt_oss", num_local_experts=4)
    assert error(oss, "experts").endswith("not routed experts of this family with this trainer; narrow the pattern")


def test_the_base_may_be_bfloat16(one_rank, mixture, tmp_path):
    """With rank 8, the products of all experts are computed together."""
    lora, trainer = LORA | {"rank": 8}, {"dtype": "bfloat16", "lr": 1e-4}
    reports, weights, adapter = train(one_rank, mixture, tmp_path / "out", trainer, lora=lora)
    base, name = load_file(mixture / "model.safetensors"), "model.layers.1.mlp.experts.4.up_proj"
    a, b = adapter[f"{name}.lora_A"], adapter[f"{name}.lora_B"]
    assert a.dtype == b.dtype == torch.float32 and b.any() and reports[0]["train/skipped"] == 0
    assert torch.equal(
        weights[f"{name}.weight"], torch.addmm(base[f"{name}.weight"].bfloat16().float(), b, a, alpha=0.75)
    )
