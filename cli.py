"""The `foredraft` command. torch and the models are imported by the commands that need them, not by `--help`."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn


class UsageError(ValueError):
    """A command line that cannot be run."""


class Parser(argparse.ArgumentParser):
    """Errors are exceptions of one sentence; no abbreviations, so that a new option cannot change an old command."""

    def __init__(self, **kwargs: Any):
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 2 bad input (one line on stderr), 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parser = build_parser(next((word for word in arguments if not word.startswith("-")), None))
        try:
            options, unknown = parser.parse_known_args(arguments)
        except SystemExit as end:  # --help, --version
            return int(end.code or 0)
        if unknown:
            raise UsageError(_unknown(unknown[0], options.flags))
        if options.run is None:
            parser.print_help()
            return 0
        return int(options.run(options) or 0)
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        if os.environ.get("FOREDRAFT_DEBUG"):
            raise
        print(f"foredraft: {_sentence(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("foredraft: interrupted", file=sys.stderr)
        return 130


def build_parser(chosen: str | None = None) -> Parser:
    """The parser; only the chosen command gets its arguments, because method options are read from the methods."""
    parser = Parser(prog="foredraft", description="Speculative decoding for autoregressive image models.")
    parser.add_argument("--version", action="version", version=f"foredraft {_package().__version__}")
    parser.set_defaults(run=None, flags=[])
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    for name, (help, add, run) in COMMANDS.items():
        command = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        if name == chosen:
            add(command)
            flags = [flag for action in command._actions for flag in action.option_strings]
            command.set_defaults(run=run, flags=flags)
    return parser


def _package() -> Any:
    """This copy of the package, whatever it is called."""
    import importlib

    return importlib.import_module(__package__)


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the operation'}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _unknown(word: str, flags: list[str]) -> str:
    near = difflib.get_close_matches(word.partition("=")[0], flags, n=1, cutoff=0.5)
    return f"unknown argument {word}" + (f": did you mean {near[0]}?" if near else " (see --help)")


# -- files -----------------------------------------------------------------------------------------------------------


def check_target(path: Path, pictures: bool = True) -> Path:
    """The path, if a file can be written there. Raises UsageError."""
    if pictures:
        from PIL import Image

        if Image.registered_extensions().get(path.suffix.lower()) not in Image.SAVE:
            raise UsageError(f"{path} is not a name for a picture: end it with .png, .jpg or .webp")
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: " + ("it is a folder" if path.is_dir() else f"there is no folder {path.parent}"))
    return path


@contextmanager
def whole_files() -> Iterator[Callable[[Path], Path]]:
    """Hands out a temporary name beside each target; all are renamed at the end, or all removed on an error."""
    pairs: list[tuple[Path, Path]] = []

    def temporary(target: Path) -> Path:
        name = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
        pairs.append((name, target))
        return name

    try:
        yield temporary
        for name, target in pairs:
            name.replace(target)
    finally:
        for name, _ in pairs:
            name.unlink(missing_ok=True)


def slug(prompt: str) -> str:
    """A file name from a prompt."""
    return re.sub(r"[^\w]+", "-", prompt.lower()).strip("-_")[:60].strip("-") or "picture"


def numbered(path: Path, number: int, count: int) -> Path:
    """`fox.png`, or `fox-0.png`, `fox-1.png`, ... where there are several."""
    return path if count == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")


# -- commands --------------------------------------------------------------------------------------------------------


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Arguments of `foredraft generate`."""
    from .bench import arguments

    parser.add_argument("prompt", help="what to draw, for example fox, or 'red apple on blue'")
    parser.add_argument("--method", default="sjd", help=f"{', '.join(arguments.methods())} (default: sjd)")
    parser.add_argument("--compare", action="store_true", help="draw with plain decoding first, for the speed-up")
    arguments.add_output(parser, "picture (default: the prompt's words .png); the token map is put beside it")
    arguments.add_model(parser)
    arguments.add_call(parser)
    arguments.add_methods(parser)


def generate(options: argparse.Namespace) -> None:
    """Draw, save pictures and maps, print the table."""
    from .bench import arguments, report
    from .bench.cases import Case, method_class
    from .bench.compare import AR, is_seeded, verdict

    case = Case(options.method, arguments.method_options(options))
    method_class(case.method).config_class.from_options(case.options)
    out = check_target(options.out or Path(f"{slug(options.prompt)}.png"))
    targets = [numbered(out, number, options.num) for number in range(options.num)]
    maps = [target.with_name(f"{target.stem}-heatmap.png") for target in targets]
    for path in [options.json] if options.json else []:
        check_target(path, pictures=False)
    models, call = arguments.family(options), arguments.call_options(options)
    cases = [Case(AR), case] if options.compare and case.method != AR else [case]
    for item in cases:
        models.pipeline(item.method)
    for item in cases if options.compare else []:
        models.warm_up(item, options.prompt, **call)
    outputs = []
    for item in cases:
        pipeline = models.pipeline(item.method)
        pipeline.set_progress_bar_config(disable=None, desc=item.method, unit=" tokens", leave=False)
        outputs.append(models.draw(item, options.prompt, options.seed, **call))
    output, seconds = outputs[-1]
    with whole_files() as temporary:
        for image, trace, target, place in zip(output.images, output.traces, targets, maps, strict=True):
            image.save(temporary(target))
            trace.heatmap(image, options.heatmap_kind).save(temporary(place))
        if options.json:
            record = {"prompt": options.prompt, "method": case.method, "options": case.options, "seed": options.seed}
            record["pictures"] = [str(target) for target in targets]
            record["seconds"], record["ar_seconds"] = seconds, outputs[0][1] if options.compare else None
            record["traces"] = [json.loads(trace.to_json()) for trace in output.traces]
            temporary(options.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    lines = []
    for item, (drawn, taken) in zip(cases, outputs, strict=True):
        totals, speedup = report.Totals.of(drawn.traces), outputs[0][1] / taken if options.compare else None
        lines.append(report.row(item.name, taken, speedup, totals, any(trace.judged for trace in drawn.traces)))
    print(report.table(report.HEADERS, lines))
    if len(outputs) > 1 and is_seeded(case):
        print(verdict(case.name, output.tokens, outputs[0][0].tokens, outputs[0][0].traces))
    for note in report.notes(case.name, output.traces):
        print(note)
    print("wrote " + ", ".join(str(path) for path in [*targets, *maps, *([options.json] if options.json else [])]))


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Arguments of `foredraft compare`."""
    from .bench import arguments

    parser.add_argument("prompt", help="what to draw, for example fox, or 'red apple on blue'")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["ar", "sjd"],
        metavar="METHOD[:OPTION=VALUE,...]",
        help="for example ar sjd sjd:rule=exact,tail=coupled speculative:tree=dynamic (default: ar sjd)",
    )
    parser.add_argument("--repeats", type=arguments.count, default=1, help="rounds of timing (default: 1)")
    arguments.add_output(parser, "contact sheet of pictures and token maps (default: compare.png)")
    arguments.add_model(parser)
    arguments.add_call(parser)


def compare(options: argparse.Namespace) -> None:
    """Print the table, save the contact sheet."""
    from .bench import arguments
    from .bench.cases import parse_case
    from .bench.compare import compare as run

    out = check_target(options.out or Path("compare.png"))
    if options.json:
        check_target(options.json, pictures=False)
    cases = [parse_case(spec) for spec in options.methods]
    call = arguments.call_options(options)
    models = arguments.family(options)
    result = run(options.prompt, cases, seed=options.seed, repeats=options.repeats, family=models, **call)
    with whole_files() as temporary:
        result.sheet(options.heatmap_kind).save(temporary(out))
        if options.json:
            temporary(options.json).write_text(json.dumps(result.to_dict(), indent=1) + "\n", encoding="utf-8")
    print("\n".join([result.table(), *result.verdicts(), f"wrote {out}"]))


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Arguments of `foredraft bench`."""
    from .bench import arguments, harness

    parser.add_argument("name", nargs="?", default="speed", help=f"{' or '.join(harness.benches())} (default: speed)")
    parser.add_argument("--quick", action="store_true", help="a few cases once: to see that it works, not to quote")
    parser.add_argument("--repeats", type=arguments.count, help="rounds of timing (default: 5)")
    parser.add_argument("--pictures", type=arguments.count, help="pareto, cool_sd, vvs: pictures per setting (default: 400)")
    halves = parser.add_mutually_exclusive_group()
    halves.add_argument(
        "--draw-only",
        action="store_true",
        help="pareto, cool_sd, vvs: draw and judge, on a GPU say; the same command without this, elsewhere, times what was drawn",
    )
    halves.add_argument(
        "--drawn", action="store_true", help="pareto, cool_sd, vvs: time and report what is drawn so far, and draw nothing"
    )
    parser.add_argument("--out", type=Path, default=Path("."), metavar="DIR", help="folder for JSON and plot (default: .)")
    arguments.add_model(parser)


def bench(options: argparse.Namespace) -> None:
    """Run one bench: print its tables, write JSON and plot."""
    from .bench import arguments, harness, quality

    run = harness.bench(options.name)
    harness.check_plotting()
    if not options.out.is_dir():
        raise UsageError(f"there is no folder {options.out}")
    partial = options.out / f"bench-{options.name}.partial.json"
    resumed: dict[str, Any] = {}
    if harness.resumes(run):
        resumed = {"drawing": quality.Drawing(options.pictures, partial, options.drawn)}
    elif options.pictures or options.draw_only or options.drawn:
        raise UsageError(f"--pictures, --draw-only and --drawn are for pareto, cool_sd and vvs, not for {options.name}")
    repeats = 0 if options.draw_only else options.repeats or (1 if options.quick else 5)
    report = run(arguments.family(options), options.quick, repeats, **resumed)
    if options.draw_only:
        print(f"drawn: {partial}; without --draw-only this is timed and reported")
        return
    with whole_files() as temporary:
        names = [options.out / f"bench-{options.name}.{suffix}" for suffix in ("json", "png")]
        report.write(*(temporary(name) for name in names))
    if not options.drawn:
        partial.unlink(missing_ok=True)
    print(f"{report.text()}\n\nwrote {names[0]}, {names[1]}")


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Arguments of `foredraft demo`."""
    from .bench import arguments

    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to serve on; 0.0.0.0 is every network (default: 127.0.0.1)")
    group.add_argument("--port", type=arguments.count, help="port (default: the first free one from 7860)")
    group.add_argument("--share", action="store_true", help="also open a public link through Gradio's servers")
    group.add_argument(
        "--at-once", type=arguments.count, default=1, help="drawings side by side; 1 keeps times honest (default: 1)"
    )
    arguments.add_model(parser)


def demo(options: argparse.Namespace) -> None:
    """Serve the web demo until interrupted."""
    import importlib.util

    from .bench import arguments

    if importlib.util.find_spec("gradio") is None:
        raise ModuleNotFoundError("the web demo needs gradio, which is not installed: pip install 'foredraft[demo]'")
    from .web.demo import launch

    launch(arguments.family(options), options.host, options.port, options.share, options.at_once)


def add_train(parser: argparse.ArgumentParser) -> None:
    """Arguments of `foredraft train`."""
    from .training import demo, head

    stages = parser.add_subparsers(dest="what", required=True)
    demo.add_arguments(stages.add_parser("demo", help="the embedded family"))
    head.add_arguments(stages.add_parser("head", help="a draft head for a family's target"))


def train(options: argparse.Namespace) -> int:
    """Train; progress goes to stderr."""
    import logging

    from .training import demo, head

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return head.run(options) if options.what == "head" else demo.run(options)


def add_convert(parser: argparse.ArgumentParser) -> None:
    """Arguments of `foredraft convert`."""
    from .bench.arguments import DTYPES
    from .models.loading import FAMILIES

    parser.add_argument("family", metavar="FAMILY", help=f"{', '.join(FAMILIES)}")
    parser.add_argument("source", help="original file or folder, transformers folder, Hub id, or owner/name/file.pt on the Hub")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the folder to make (default: FAMILY-<name of the source>)")
    parser.add_argument(
        "--component",
        action="append",
        default=[],
        metavar="NAME=PLACE",
        help="where a component lies, for example codec=vq_ds16_t2i.pt or text_encoder=google/flan-t5-xl; may be repeated",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they are stored)")


def convert(options: argparse.Namespace) -> None:
    """Convert a checkpoint; interrupted or failed, nothing is left."""
    import signal

    import torch

    from .bench.describe import describe
    from .models.convert import convert as run

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    named = {}
    for text in options.component:
        name, sign, place = text.partition("=")
        if not (name and sign and place):
            raise UsageError(f"--component is NAME=PLACE, got {text!r}")
        named[name] = place
    out = options.out or Path(f"{options.family}-{Path(options.source).stem or 'model'}")
    before = signal.signal(signal.SIGTERM, stop)
    try:
        folder = run(options.source, out, options.family, named, getattr(torch, options.dtype) if options.dtype else None)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(describe(folder))


def add_info(parser: argparse.ArgumentParser) -> None:
    """Arguments of `foredraft info`."""
    parser.add_argument("path", nargs="?", help="folder, checkpoint or Hub id (default: the embedded family)")


def info(options: argparse.Namespace) -> None:
    """Describe a model folder."""
    from .bench.describe import describe

    print(describe(options.path or _package().DEMO))


Command = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], Any]]
COMMANDS: dict[str, Command] = {
    "generate": ("draw pictures of a prompt, with their token maps", add_generate, generate),
    "compare": ("draw one prompt with several methods and time them", add_compare, compare),
    "bench": ("measure speed-ups and where the time goes", add_bench, bench),
    "demo": ("race, explore and compare methods in the browser", add_demo, demo),
    "train": ("rebuild the embedded model family, or train a draft head", add_train, train),
    "convert": ("turn a checkpoint into a folder of safetensors", add_convert, convert),
    "info": ("describe a model folder or a checkpoint", add_info, info),
}


if __name__ == "__main__":
    sys.exit(main())
