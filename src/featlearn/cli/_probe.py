"""``featlearn probe``: feature matrices and correlations of a model on data."""

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
from featlearn.cli._console import print_files, print_json, result_console, text_table
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
_ROOM = 512 << 20  # bytes of matrices that are written out
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
    "NFC": "cosine of the weights' W^T W with the gradients through them, W^T K W: 1 is aligned",
    "±": "standard error of the NFC, because outputs were drawn at random",
    "centered": "the same for the change of the weights since the start",
    "FACT": "cosine of W^T W with FACT, which is equal to it at the end of a training with weight decay",
    "eNFA": "cosine of W^T W with the gradients of the loss",
    "C/UC": "share of the change in the NFC",
    "moved": "|W - W0| / |W0|",
    "relgrad": "gradient of loss and weight decay together, relative to that of the decay: 0 at the end",
}


class Loss(StrEnum):
    """Losses by name."""

    mse = "mse"
    cross_entropy = "cross_entropy"


def probe(
    source: Annotated[str, typer.Argument(help="file.py:factory, package.module:factory, or a Hugging Face folder.")],
    data: Annotated[str, typer.Option(help="A file (.csv, .parquet, .npz, .safetensors, .txt), or digits, iris, ...")],
    checkpoint: Annotated[Path | None, typer.Option(help="Weights to load: .safetensors, .pt, ...")] = None,
    initial: Annotated[Path | None, typer.Option(help="Weights before training, for centered numbers.")] = None,
    loss: Annotated[Loss | None, typer.Option(help="The loss of the training, for eNFA and FACT.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="That of the training, for FACT; needs --loss.")] = None,
    target: Annotated[str | None, typer.Option(help="Column of a table that is the target.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows at the most, drawn at random.")] = None,
    standardize: Annotated[bool, typer.Option("--standardize", help="Inputs to mean 0, deviation 1.")] = False,
    standardise: Annotated[bool, typer.Option("--standardise", hidden=True)] = False,
    layers: Annotated[list[str] | None, typer.Option(help="Only layers that match a glob; may be repeated.")] = None,
    outputs: Annotated[str, typer.Option(help="auto, exact, or a number of random output vectors.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of rows and output vectors.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for report, matrices and page.")] = Path("probe"),
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser at the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON instead.")] = False,
) -> None:
    """Measure what the layers of a model have become aligned with.

    The factory takes no arguments and returns a torch.nn.Module. Tables are
    taken as they are, images with pixels from 0 to 1; --standardize changes
    that. Checkpoints are read as tensors alone: nothing in them is executed.
    Writes the report, its matrices, and a page with pictures.

    Examples:
      featlearn probe model.py:net --data digits --checkpoint trained.pt
      featlearn probe model.py:net --data table.csv --target y --rows 1000
      featlearn probe models/gpt2 --data lines.txt --layers "*mlp*"
      featlearn probe model.py:net --data xy.npz --checkpoint end.safetensors
          --initial start.safetensors --loss mse --weight-decay 1e-4
    """
    with handle_errors():
        if standardise:
            print_notice("--standardise is deprecated: use --standardize")
        check_folder(out, _FILES)
        if weight_decay is not None and loss is None:
            raise InputError("--weight-decay is for FACT, which needs --loss as well")
        began = time.perf_counter()
        with redirect_stdout(sys.stderr):  # what the user's code prints is no result
            report, about = _probe(
                source, data, checkpoint, initial, None if loss is None else loss.value, weight_decay, target, rows,
                standardize or standardise, layers, outputs, seed,
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
    target: str | None, rows: int | None, standardize: bool, layers: list[str] | None, outputs: str, seed: int,
) -> tuple[Report, str]:  # fmt: skip
    from featlearn.cli._input_data import LOSSES, load_data
    from featlearn.cli._model_loader import load_model, with_weights
    from featlearn.features import probe as measure

    made = load_model(source)
    model = made if checkpoint is None else with_weights(made, checkpoint)
    start = None if initial is None else with_weights(copy.deepcopy(made), initial)
    folder = Path(source) if Path(source).is_dir() else None
    found = load_data(
        data, model, target=target, rows=rows, standardize=standardize, labeled=loss is not None,
        classes=loss == "cross_entropy", tokenizer=folder, seed=seed,
    )  # fmt: skip
    drawn = outputs.isascii() and outputs.isdigit()
    if outputs not in ("auto", "exact") and not drawn:
        raise InputError(f"--outputs must be auto, exact or a number, got {outputs!r}")
    try:
        report = measure(
            model,
            found.batch,
            initial=start,
            loss=None if loss is None else LOSSES[loss],
            weight_decay=decay,
            layers=layers,
            outputs=int(outputs) if drawn else outputs,
            generator=seed,
            progress=True,
        )
    except FeatlearnError:
        raise
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"the model cannot take {found.about}: {told}") from error
    if not len(report):
        reasons = pick_text((f"{row.parameter} ({row.reason})" for row in report.parameters), 3)
        raise InputError(f"no layer of {source!r} could be measured: {reasons or 'it has no weight matrix'}")
    return report, found.about


def _shown(table: pd.DataFrame) -> pd.DataFrame:
    """The table with titles that fit a terminal."""
    columns = [name for name in _COLUMNS if name in table.columns and table[name].notna().any()]
    return table[["shape", *columns]].rename(columns=_COLUMNS)


def _matrices(report: Report) -> dict[str, dict[str, Tensor]]:
    """Feature matrices by layer and name, in single precision, as far as there is room."""
    from featlearn.features import NotMeasuredError

    found: dict[str, dict[str, Tensor]] = {}
    room = _ROOM
    for name, features in report.items():
        groups, _, side = features.shape
        if 4 * 4 * groups * side**2 > room:
            continue
        found[name] = {}
        for matrix in ("nfm", "agop", "fact", "enfa"):
            with suppress(NotMeasuredError):
                found[name][matrix] = features.matrix(matrix).float().contiguous()
                room -= 4 * found[name][matrix].numel()
    if len(found) < len(report):
        print_notice(f"the matrices of {count(len(report) - len(found), 'layer')} are too large to be written out")
    return found


def _write(
    report: Report, shown: pd.DataFrame, matrices: dict[str, dict[str, Tensor]], settings: dict[str, Any], out: Path
) -> None:
    from safetensors.torch import save_file

    from featlearn.reports import write_report

    with staged(out) as draft:
        report.save(draft / "report")
        report.table("all").to_csv(draft / "layers.csv")
        tensors = {
            f"{layer}/{name}": m.float().contiguous() for layer, of in matrices.items() for name, m in of.items()
        }
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
        told = {"agop": f"cosine with NFM {report[name].nfc:.2f}"}
        flat = {key: m[0] if m.ndim == 3 else m for key, m in of.items()}
        side = len(flat["nfm"])
        cut = f", the first {_CROP} of {side} rows and columns" if side > _CROP else ""
        figures[f"layer {name}{cut}"] = matrix_row(
            flat, titles={key: titles[key] for key in flat}, subtitles=told, crop=_CROP if side > _CROP else None
        )
    sections = [
        Section(
            "Layers",
            (),
            {"": shown},
            {"Correlations by layer": report.plot()},
            {title: _MEANINGS[title] for title in shown.columns if title in _MEANINGS},
        )
    ]
    flags = {name: "; ".join(features.flags) for name, features in report.items() if features.flags}
    if flags:
        sections.append(Section("Remarks on layers", settings=flags))
    if figures:
        more = f"The first {len(first)} of {count(len(report), 'layer')}. " if len(first) < len(report) else ""
        words = f"{more}Each matrix is divided by its largest entry."
        sections.append(Section("Feature matrices", (words,), figures=figures))
    left = [(row.parameter, row.reason) for row in report.parameters if not row.taken]
    if left:
        table = pd.DataFrame(left, columns=["parameter", "reason"]).set_index("parameter")
        sections.append(Section("Parameters that are no layers", (), {"": table}))
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
    console.print(
        f"{count(len(report), 'layer')} on {about}; outputs: {_outputs(report)}", markup=False, soft_wrap=True
    )
    columns = {"layer": "name", "shape": "left"} | dict.fromkeys(shown.columns[1:], "right")
    rows = [(str(name), shape, *(_number(v) for v in numbers)) for name, shape, *numbers in shown.itertuples()]
    console.print(text_table(columns, rows))
    for name, features in report.items():
        if features.flags:
            console.print(f"{name}: {'; '.join(features.flags)}", markup=False, soft_wrap=True)
    left = [row for row in report.parameters if not row.taken]
    if left:
        told = pick_text((f"{row.parameter} ({row.reason})" for row in left), 2)
        console.print(f"{count(len(left), 'parameter')} taken as no layer: {told}", markup=False, soft_wrap=True)
    console.print()
    print_files(
        console,
        [
            (out / "index.html", "the table and the feature matrices"),
            (out / "layers.csv", "all columns"),
            (out / "matrices.safetensors", "feature matrices"),
            (out / "report", "featlearn.Report.load reads it"),
        ],
    )


def _number(value: float) -> str:
    return "–" if value != value else f"{value:.3f}" if abs(value) < 100 else f"{value:.3g}"
