"""EleutherAI's harness on an exported folder, where it is installed: its log-likelihoods are the model's own."""

import json
from pathlib import Path

import pytest
import torch

from data.tokenizer import load_tokenizer
from launcher import convert
from tests.launcher.tiny_models import configuration, random_model, save_run

DOCUMENTS = [("def read(", "self, size):"), ("import ", "os"), ("class Foo:", "\n    pass  # \u4e2d")]
TASK = """
task: tiny_words
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{target}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""


def test_log_likelihoods_are_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    lm_eval = pytest.importorskip("lm_eval")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    from lm_eval.tasks import TaskManager

    model = random_model(configuration(activation="swiglu"))
    run = save_run(tmp_path / "run", model, tensor=2)
    assert convert.main(["to-hf", str(run), str(tmp_path / "out")]) == 0
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    rows = [json.dumps({"prompt": prompt, "target": target}) for prompt, target in DOCUMENTS]
    (tasks / "tiny.jsonl").write_text("\n".join(rows) + "\n")
    (tasks / "tiny.yaml").write_text(TASK.format(file=tasks / "tiny.jsonl"))
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(tmp_path / "out"), "dtype": "float32"},
        tasks=["tiny_words"],
        task_manager=TaskManager(include_path=str(tasks)),
        device="cpu",
        bootstrap_iters=0,
    )
    found = {sample["doc"]["prompt"]: float(sample["resps"][0][0][0]) for sample in results["samples"]["tiny_words"]}

    tokenizer = load_tokenizer(tmp_path / "corpus" / "tokenizer.model")
    for prompt, target in DOCUMENTS:
        # The harness puts behind the prompt's ids what the ids of both together have beyond as many; blanks at the
        # prompt's end count as the target's.
        context = tokenizer.encode(prompt.rstrip())
        ids = context + tokenizer.encode(prompt + target)[len(context) :]
        with torch.no_grad():
            log_probabilities = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
        wanted = sum(log_probabilities[i - 1, ids[i]].item() for i in range(len(context), len(ids)))
        assert found[prompt] == pytest.approx(wanted, abs=1e-4)
