"""Options that several commands share, spelled once."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Ckpt", "Json", "NoPlanCache", "PlanCacheDir", "ProgressMode", "Quiet", "RankTimeout", "Verbose"]

Ckpt = Annotated[
    str, typer.Argument(metavar="CKPT", help="A checkpoint: its folder, the training run's folder, or a file inside.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.", rich_help_panel="Output")]
Quiet = Annotated[
    bool, typer.Option("-q", "--quiet", help="No progress, notes or next steps.", rich_help_panel="Output")
]
Verbose = Annotated[
    int,
    typer.Option("-v", "--verbose", count=True, help="Say more; twice: tracebacks.", rich_help_panel="Output"),
]
ProgressMode = Annotated[
    str,
    typer.Option(
        "--progress",
        metavar="MODE",
        envvar="DISTCKPT_PROGRESS",
        help="auto, bar, log (a line every 30 s) or off.",
        rich_help_panel="Output",
    ),
]
RankTimeout = Annotated[
    float,
    typer.Option(
        "--rank-timeout",
        metavar="SECONDS",
        envvar="DISTCKPT_RANK_TIMEOUT",
        min=0.1,
        help="Under torchrun or srun: a rank silent for so long is lost.",
        rich_help_panel="Resources",
    ),
]
PlanCacheDir = Annotated[
    str | None,
    typer.Option(
        "--plan-cache",
        metavar="DIR",
        envvar="DISTCKPT_PLAN_CACHE",
        help="Where plans are kept for the next iteration; by default ~/.cache/distckpt/plans.",
        rich_help_panel="Resources",
    ),
]
NoPlanCache = Annotated[
    bool, typer.Option("--no-plan-cache", help="Neither use nor keep a plan.", rich_help_panel="Resources")
]
