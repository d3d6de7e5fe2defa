"""What a grammar costs: to be checked, to be compiled, and for each token.

    python -m benchmarks.grammar [--model FOLDER_OR_ID]

Three tables: the router's check of ordinary and of hostile texts, in wall time of the asker; a
node's compiling of the ordinary ones; and a sampler's row with a grammar beside one without, over
outputs drawn at random (which is harder than what a model writes: less of it is forced).
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from common.engine.sampler import Draw, Sampler
from common.grammar.matcher import CompiledGrammar
from common.grammar.source import as_lark
from common.grammar.store import GrammarStore
from common.grammar.vocabulary import Vocabulary, load_vocabulary
from common.messages import Grammar, GrammarKind, SamplingParams
from common.model_folder import read_json
from common.plan import Sample, SlotInit
from deploy.default_model import resolve_model
from router.errors import ApiError
from router.grammar_checks import GrammarChecks
from tests.integration.structured import SCHEMA

CPU = torch.device("cpu")
ROWS = 3000


def schema(content: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(content))


def _wide(properties: int) -> dict[str, Any]:
    fields = {f"field_{i}": {"type": "integer"} for i in range(properties)}
    return {"type": "object", "properties": fields, "required": list(fields)}


_TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "string"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
        }
    },
    "$ref": "#/$defs/node",
}

ORDINARY = {
    "any JSON object": schema({}),
    "an order (nested, 12 fields)": schema(SCHEMA),
    "a recursive list": schema(_TREE),
    "100 required fields": schema(_wide(100)),
    "1,000 required fields": schema(_wide(1000)),
    "an enum of 5,000": schema({"enum": [f"item {i}" for i in range(5000)]}),
    "regex: a date": Grammar(GrammarKind.REGEX, r"\d{4}-\d{2}-\d{2}"),
    "choice of 3": Grammar(GrammarKind.CHOICE, '["red","green","blue"]'),
    "EBNF: sums in brackets": Grammar(
        GrammarKind.EBNF, 'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"\n'
    ),
}
HOSTILE = {
    "intersection of 50 regexes": Grammar(
        GrammarKind.EBNF, "start: T\nT: " + " & ".join(f"/(.*x){{{i}}}.*/" for i in range(50))
    ),
    "multipleOf 999983": schema({"type": "integer", "multipleOf": 999983}),
    "allOf of 10 anyOfs": schema(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(2)]}
                for i in range(10)
            ]
        }
    ),
    "1,000 optional fields": schema({"properties": _wide(1000)["properties"]}),
    "chain of 4,500 rules": Grammar(
        GrammarKind.EBNF,
        "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4500)) + 'r4500: "x"',
    ),
    "nested 5,000 deep": Grammar(GrammarKind.JSON_SCHEMA, '{"items":' * 5000 + "{}" + "}" * 5000),
    "30,000 brackets": Grammar(GrammarKind.REGEX, "(" * 30000 + "a" + ")" * 30000),
    "remote $ref": schema({"$ref": "https://example.com/schema.json"}),
}


async def checks(folder: Path, vocab_size: int) -> None:
    """The router's check, each text once: a verdict is kept afterwards."""
    checker = GrammarChecks(folder, vocab_size, timeout_s=60)
    began = time.perf_counter()
    await checker.checked(Grammar(GrammarKind.REGEX, "warm up"), "grammar")
    print(f"\ncheck (the first starts the checker: {time.perf_counter() - began:.2f} s)")
    for name, grammar in (ORDINARY | HOSTILE).items():
        began = time.perf_counter()
        try:
            await checker.checked(grammar, "grammar")
            verdict = "taken"
        except ApiError as error:
            verdict = f"{error.status} {error.message}"[:70]
        taken_ms = (time.perf_counter() - began) * 1e3
        print(f"  {name:32} {taken_ms:8.1f} ms  {verdict}")
    await checker.close()


def compiling(vocabulary: Vocabulary) -> None:
    print("\ncompile on a node, with the first mask (median of 9)")
    for name, grammar in ORDINARY.items():
        lark = as_lark(grammar)
        times = []
        for _ in range(9):
            began = time.perf_counter()
            CompiledGrammar(lark, vocabulary).start().allowed()
            times.append(time.perf_counter() - began)
        print(f"  {name:32} {statistics.median(times) * 1e3:8.2f} ms")


def rows(vocabulary: Vocabulary) -> None:
    """Time of a sampler's row; outputs that end begin anew."""
    print(f"\none sampler's row, {vocabulary.size} logits, temperature 1, us")
    print(f"  {'':32} {'median':>8} {'mean':>8} {'p99':>8}")
    store = GrammarStore(lambda: vocabulary)
    cases: dict[str, Grammar | None] = {"no grammar": None}
    for name, grammar in (cases | ORDINARY).items():
        times = sorted(_row_times(store, vocabulary, grammar and as_lark(grammar)))
        median, p99 = statistics.median(times), times[int(len(times) * 0.99)]
        mean = statistics.fmean(times)
        print(f"  {name:32} {median * 1e6:8.0f} {mean * 1e6:8.0f} {p99 * 1e6:8.0f}")


def _row_times(store: GrammarStore, vocabulary: Vocabulary, grammar: Grammar | None) -> list[float]:
    sampler = Sampler(vocabulary.size, CPU, store)
    logits = torch.randn(64, vocabulary.size, generator=torch.Generator().manual_seed(1))
    times: list[float] = []
    seed = index = 0
    sampling: SamplingParams | None = None
    while len(times) < ROWS:
        if sampling is None:
            seed += 1
            index = 0
            sampling = SamplingParams(
                max_tokens=512, seed=seed, stop_token_ids=vocabulary.end_ids, grammar=grammar
            )
            sampler.reset(0, SlotInit(sampling, (1,), ()))
        row = logits[len(times) % 64].unsqueeze(0)
        began = time.perf_counter()
        (sample,) = sampler.sample(row, [Draw(0, index)])
        times.append(time.perf_counter() - began)
        index += 1
        drawn = sample.token_id if isinstance(sample, Sample) else None
        if drawn is None or drawn in vocabulary.end_ids or index == 256:
            sampling = None
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    folder = resolve_model(parser.parse_args().model)
    torch.set_num_threads(1)
    vocab_size = int(read_json(folder / "config.json")["vocab_size"])
    began = time.perf_counter()
    vocabulary = load_vocabulary(folder, vocab_size)
    print(f"vocabulary of {vocab_size}: {time.perf_counter() - began:.2f} s")
    compiling(vocabulary)
    rows(vocabulary)
    asyncio.run(checks(folder, vocab_size))


if __name__ == "__main__":
    main()
