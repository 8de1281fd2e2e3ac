"""Command ``featlearn spectra``, which analyzes the weight matrices of a file without the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from featlearn._utils.formatting import pick_text
from featlearn._utils.weight_formats import weight_files
from featlearn.cli._console import print_json
from featlearn.cli._errors import handle_errors
from featlearn.cli._output_dir import check_folder, open_page
from featlearn.errors import InputError


def spectra(
    source: Annotated[Path, typer.Argument(help="Weights: safetensors, a PyTorch checkpoint, npz, or a folder.")],
    initial: Annotated[
        Path | None, typer.Option(help="Weights before training: spectra are judged against theirs.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Another checkpoint, as before fine-tuning: report what changed.")
    ] = None,
    layers: Annotated[list[str] | None, typer.Option(help="Glob pattern of matrices; may be repeated.")] = None,
    max_size: Annotated[int | None, typer.Option(help="Omit larger matrices: time grows with the cube.")] = None,
    figures: Annotated[int, typer.Option(min=0, help="Number of matrices drawn on the page; 0 draws none.")] = 12,
    out: Annotated[Path, typer.Option(help="Folder for the page and the table.")] = Path("spectra"),
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Classify each weight matrix of a file as random-like, spiked, heavy-tailed or collapsed.

    Checkpoints are read without executing code. A folder of a Hugging Face
    model is accepted too. Writes spectra.csv, and index.html with a map of
    all matrices and figures of the most notable ones.

    --initial judges each spectrum against that of the random start, instead
    of a law of noise. --against compares two checkpoints matrix by matrix
    (unchanged, rescaled, low-rank or full-rank change) and writes changes.csv.

    Examples:
      featlearn spectra model.safetensors
      featlearn spectra trained.pt --initial start.pt --out spectra
      featlearn spectra tuned.safetensors --against base.safetensors
      featlearn spectra models/gpt2 --layers "*attn*" --json
    """
    with handle_errors():
        if initial is not None and against is not None:
            raise InputError(
                "--initial and --against cannot be combined. Pass --initial to judge the spectra against the start of "
                "training, or --against for the change since another checkpoint."
            )
        # Before torch is imported, so that a mistyped name is reported at once.
        weight_files(source)
        for other, name in ((initial, "initial"), (against, "against")):
            if other is not None:
                weight_files(other, name)
        check_folder(out, ("spectra.csv" if against is None else "changes.csv", "index.html"))
        if against is None:
            from featlearn.cli._spectra_page import omitted, print_spectra, write_spectra
            from featlearn.spectra import weight_spectra

            result = weight_spectra(source, layers=layers, initial=initial, max_size=max_size, progress=True)
            if not len(result):
                reasons = [f"{row['parameter']} ({row['reason']})" for _, row in result.skipped.iterrows()]
                raise InputError(f"No weight matrix of {source.name} could be measured: {pick_text(reasons, 3)}.")
            write_spectra(result, out, source.name, initial, figures)
            table, others = result.table("all"), {"not_taken": omitted(result)}
            if not as_json:
                print_spectra(result, out, figures)
        else:
            from featlearn.cli._changes_page import print_changes, write_changes
            from featlearn.spectra import compare_weights

            changes = compare_weights(source, against, layers=layers, max_size=max_size, progress=True)
            same = source.name == against.name  # then the folders differ
            names = ["/".join(path.parts[-2:]) if same else path.name for path in (source, against)]
            write_changes(changes, out, names[0], names[1], figures)
            table, others = changes.table("all"), {"not_compared": changes.skipped}
            if not as_json:
                print_changes(changes, out, figures)
        if as_json:
            rows = {name: some.to_dict(orient="records") for name, some in others.items()}
            matrices = table.reset_index().to_dict(orient="records")
            print_json({"matrices": matrices} | rows | {"page": str(out / "index.html")})
        if show:
            open_page(out / "index.html")
