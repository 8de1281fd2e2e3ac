"""Command ``featlearn probe``, which measures feature matrices and correlations of a model on data.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr.
    Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644 (FACT).
"""

from __future__ import annotations

import copy
import sys
import time
from contextlib import redirect_stdout, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from featlearn._utils.formatting import count, pick_text
from featlearn.cli._console import print_files, print_json, print_line, result_console, text_table
from featlearn.cli._errors import handle_errors, print_notice
from featlearn.cli._output_dir import check_folder, open_page, staged
from featlearn.errors import FeatlearnError, InputError

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from featlearn.features import Report
    from featlearn.reports import Section

_FILES = ("report", "layers.csv", "matrices.safetensors", "index.html")
_DRAWN = 12
_ROOM = 512 << 20  # maximum size of the matrices that are written, in bytes
_CROP = 256
_COLUMNS = {
    "nfc": "NFC",
    "nfc_se": "±",
    "centered_nfc": "centered",
    "fact": "FACT",
    "enfa": "eNFA",
    "centered_ratio": "C/UC",
    "weight_change": "moved",
    "relgrad": "relgrad",
}
_MEANINGS = {
    "NFC": "cosine of W^T W with the average gradient outer product W^T K W; 1 is aligned",
    "±": "standard error of the NFC, since random output vectors were used",
    "centered": "NFC of the change of the weights since the start",
    "FACT": "cosine of W^T W with FACT, which equals it at convergence of a training with weight decay",
    "eNFA": "cosine of W^T W with the outer product of the loss gradients",
    "C/UC": "share of the change in the NFC",
    "moved": "|W - W0| / |W0|",
    "relgrad": "gradient of loss plus weight decay, relative to that of weight decay; 0 at convergence",
}


class Loss(StrEnum):
    """Loss of the training."""

    mse = "mse"
    cross_entropy = "cross_entropy"


def probe(
    source: Annotated[str, typer.Argument(help="file.py:factory, package.module:factory, or a Hugging Face folder.")],
    data: Annotated[str, typer.Option(help="File (.csv, .parquet, .npz, .safetensors, .txt), or digits, iris, ...")],
    checkpoint: Annotated[Path | None, typer.Option(help="Weights to load: .safetensors, .pt, ...")] = None,
    initial: Annotated[Path | None, typer.Option(help="Weights before training, for centered metrics.")] = None,
    loss: Annotated[Loss | None, typer.Option(help="Loss of the training, for eNFA and FACT.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay, for FACT; requires --loss.")] = None,
    target: Annotated[str | None, typer.Option(help="Target column of a table.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Maximum number of rows, drawn at random.")] = None,
    standardize: Annotated[bool, typer.Option("--standardize", help="Scale inputs to mean 0, deviation 1.")] = False,
    standardize_old: Annotated[bool, typer.Option("--standardise", hidden=True)] = False,
    layers: Annotated[list[str] | None, typer.Option(help="Glob pattern of layers; may be repeated.")] = None,
    split: Annotated[list[str] | None, typer.Option(help="experts, heads or GLOB=PARTS; may be repeated.")] = None,
    embeddings: Annotated[bool, typer.Option("--embeddings", help="Measure embeddings as layers.")] = False,
    outputs: Annotated[str, typer.Option(help="auto, exact, or a number of random output vectors.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of rows and output vectors.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the report and the matrices.")] = Path("probe"),
    show: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Measure the alignment of the layers of a model with its gradients.

    The factory takes no arguments and returns a torch.nn.Module. Tables are
    used without scaling, images with pixels from 0 to 1, unless
    --standardize is given. Checkpoints are read without executing code.
    Writes the report, its matrices, and a page with figures.

    Examples:
      featlearn probe model.py:net --data digits --checkpoint trained.pt
      featlearn probe model.py:net --data table.csv --target y --rows 1000
      featlearn probe models/gpt2 --data lines.txt --layers "*mlp*"
      featlearn probe models/gpt2 --data lines.txt --split heads --embeddings
      featlearn probe model.py:net --data xy.npz --checkpoint end.safetensors
          --initial start.safetensors --loss mse --weight-decay 1e-4
    """
    with handle_errors():
        if standardize_old:
            print_notice("--standardise is deprecated: use --standardize")
        check_folder(out, _FILES)
        if weight_decay is not None and loss is None:
            raise InputError("--weight-decay requires --loss: FACT is computed from the loss gradient.")
        began = time.perf_counter()
        with redirect_stdout(sys.stderr):  # the user's code may print, and stdout is for results
            report, about = _probe(
                source, data, checkpoint, initial, None if loss is None else loss.value, weight_decay, target, rows,
                standardize or standardize_old, layers, _parse_split(split), embeddings, outputs, seed,
            )  # fmt: skip
        table = report.table([*_COLUMNS], strict=False)
        shown = _shown(table)
        drawn = _matrices(report)
        settings = {
            "model": source,
            "data": about,
            "checkpoint": checkpoint,
            "initial": initial,
            "loss": None if loss is None else loss.value,
            "weight decay": weight_decay,
            "outputs": _outputs(report),
            "time": f"{time.perf_counter() - began:.1f} s",
        }
        _write(report, shown, drawn, {k: v for k, v in settings.items() if v is not None}, out)
        if as_json:
            print_json(_numbers(report, table, out))
        else:
            _print(report, shown, about, out)
        if show:
            open_page(out / "index.html")


def _probe(
    source: str, data: str, checkpoint: Path | None, initial: Path | None, loss: str | None, decay: float | None,
    target: str | None, rows: int | None, standardize: bool, layers: list[str] | None,
    split: list[str | dict[str, int]] | None, embeddings: bool, outputs: str, seed: int,
) -> tuple[Report, str]:  # fmt: skip
    from featlearn.cli._input_data import LOSSES, load_data
    from featlearn.cli._model_loader import load_model, with_weights
    from featlearn.features import probe as measure

    made = load_model(source)
    model = made if checkpoint is None else with_weights(made, checkpoint)
    start = None if initial is None else with_weights(copy.deepcopy(made), initial)
    folder = Path(source) if Path(source).is_dir() else None
    loaded = load_data(
        data, model, target=target, rows=rows, standardize=standardize, labeled=loss is not None,
        classes=loss == "cross_entropy", tokenizer=folder, seed=seed,
    )  # fmt: skip
    drawn = outputs.isascii() and outputs.isdigit()
    if outputs not in ("auto", "exact") and not drawn:
        raise InputError(f"--outputs must be auto, exact or a number, got {outputs!r}.")
    function = None if loss is None else LOSSES[loss]
    vectors = int(outputs) if drawn else outputs
    try:
        report = measure(
            model, loaded.batch, initial=start, loss=function, weight_decay=decay, layers=layers, outputs=vectors,
            generator=seed, progress=True, split=split, embeddings=embeddings,
        )  # fmt: skip
    except FeatlearnError:
        raise
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"The model cannot be called with {loaded.about}: {reason}") from error
    if not len(report):
        reasons = pick_text((f"{row.parameter} ({row.reason})" for row in report.parameters), 3)
        raise InputError(f"No layer of {source!r} could be measured: {reasons or 'it has no weight matrix'}.")
    return report, loaded.about


def _parse_split(split: list[str] | None) -> list[str | dict[str, int]] | None:
    """Return the parts that options such as ``heads`` and ``up=4`` ask for."""
    parts: list[str | dict[str, int]] = []
    for text in split or ():
        glob, equals, number = text.rpartition("=")
        if text not in ("experts", "heads") and not (equals and number.isascii() and number.isdigit()):
            raise InputError(f"--split must be experts, heads or GLOB=PARTS, got {text!r}.")
        parts.append({glob: int(number)} if equals else text)
    return parts or None


def _shown(table: pd.DataFrame) -> pd.DataFrame:
    """Return the measured columns with short titles for a terminal."""
    columns = [name for name in _COLUMNS if name in table.columns and table[name].notna().any()]
    return table[["shape", *columns]].rename(columns=_COLUMNS)


def _matrices(report: Report) -> dict[str, dict[str, Tensor]]:
    """Return feature matrices by layer and name, in single precision, up to a total size."""
    from featlearn.features import NotMeasuredError

    result: dict[str, dict[str, Tensor]] = {}
    room = _ROOM
    for name, features in report.items():
        groups, _, side = features.shape
        if 4 * 4 * groups * side**2 > room:
            continue
        result[name] = {}
        for matrix in ("nfm", "agop", "fact", "enfa"):
            with suppress(NotMeasuredError):
                result[name][matrix] = features.matrix(matrix).float().contiguous()
                room -= 4 * result[name][matrix].numel()
    if len(result) < len(report):
        print_notice(f"the matrices of {count(len(report) - len(result), 'layer')} are too large to be written")
    return result


def _write(
    report: Report, shown: pd.DataFrame, matrices: dict[str, dict[str, Tensor]], settings: dict[str, Any], out: Path
) -> None:
    from safetensors.torch import save_file

    from featlearn.reports import write_report

    with staged(out) as draft:
        report.save(draft / "report")
        report.table("all").to_csv(draft / "layers.csv")
        tensors = {f"{layer}/{name}": m for layer, of in matrices.items() for name, m in of.items()}
        save_file(tensors, str(draft / "matrices.safetensors"))
        write_report(
            draft / "index.html",
            f"Probe of {Path(settings['model']).name}",
            f"{count(len(report), 'layer')} on {settings['data']}.",
            _sections(report, shown, matrices, settings),
        )


def _sections(
    report: Report, shown: pd.DataFrame, matrices: dict[str, dict[str, Tensor]], settings: dict[str, Any]
) -> list[Section]:
    import pandas as pd

    from featlearn.plots import matrix_row
    from featlearn.reports import Section

    drawn = {name: of for name, of in matrices.items() if min(next(iter(of.values())).shape[-2:]) > 1}
    first = dict(list(drawn.items())[:_DRAWN])
    titles = {"nfm": "NFM  $W^TW$", "agop": "AGOP  $W^TKW$", "fact": "FACT", "enfa": "eNFA"}
    figures = {}
    for name, of in first.items():
        subtitles = {"agop": f"cosine with NFM {report[name].nfc:.2f}"}
        flat = {key: m[0] if m.ndim == 3 else m for key, m in of.items()}
        side = len(flat["nfm"])
        cut = f", the first {_CROP} of {side} rows and columns" if side > _CROP else ""
        figures[f"layer {name}{cut}"] = matrix_row(
            flat, titles={key: titles[key] for key in flat}, subtitles=subtitles, crop=_CROP if side > _CROP else None
        )
    meanings = {title: _MEANINGS[title] for title in shown.columns if title in _MEANINGS}
    sections = [Section("Layers", (), {"": shown}, {"Correlations by layer": report.plot()}, meanings)]
    if flags := {name: "; ".join(features.flags) for name, features in report.items() if features.flags}:
        sections.append(Section("Notes on layers", settings=flags))
    if figures:
        more = f"The first {len(first)} of {count(len(report), 'layer')}. " if len(first) < len(report) else ""
        text = f"{more}Each matrix is divided by its largest entry."
        sections.append(Section("Feature matrices", (text,), figures=figures))
    if left := [(row.parameter, row.reason) for row in report.parameters if not row.taken]:
        table = pd.DataFrame(left, columns=["parameter", "reason"]).set_index("parameter")
        sections.append(Section("Parameters not measured", (), {"": table}))
    sections.append(Section("Settings", settings=settings))
    return sections


def _outputs(report: Report) -> str:
    if report.outputs.sketches:
        return f"{report.outputs.sketches} random vectors for {report.outputs.count:,} outputs"
    return f"all {report.outputs.count}"


def _numbers(report: Report, table: pd.DataFrame, out: Path) -> dict[str, Any]:
    return {
        "samples": report.samples,
        "outputs": {"count": report.outputs.count, "sketches": report.outputs.sketches},
        "layers": table.reset_index().to_dict(orient="records"),
        "not_taken": [{"parameter": p.parameter, "reason": p.reason} for p in report.parameters if not p.taken],
        "page": str(out / "index.html"),
        "report": str(out / "report"),
    }


def _print(report: Report, shown: pd.DataFrame, about: str, out: Path) -> None:
    console = result_console()
    print_line(console, f"{count(len(report), 'layer')} on {about}; outputs: {_outputs(report)}")
    columns = {"layer": "name", "shape": "left"} | dict.fromkeys(shown.columns[1:], "right")
    rows = [(str(name), shape, *(_number(v) for v in numbers)) for name, shape, *numbers in shown.itertuples()]
    console.print(text_table(columns, rows))
    for name, features in report.items():
        if features.flags:
            print_line(console, f"{name}: {'; '.join(features.flags)}")
    if left := [f"{row.parameter} ({row.reason})" for row in report.parameters if not row.taken]:
        print_line(console, f"{count(len(left), 'parameter')} not measured: {pick_text(left, 2)}")
    console.print()
    files = {
        "index.html": "table and feature matrices",
        "layers.csv": "all columns",
        "matrices.safetensors": "feature matrices",
        "report": "for featlearn.Report.load",
    }
    print_files(console, [(out / name, what) for name, what in files.items()])


def _number(value: float) -> str:
    return "–" if value != value else f"{value:.3f}" if abs(value) < 100 else f"{value:.3g}"
