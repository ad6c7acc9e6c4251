"""Without a model the server serves the demo: a small base model and the example adapters."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

from app.settings import Settings
from punica_core.errors import ConfigError

_PREPARE = (sys.executable, "-m", "punica_core.model.demo")
_EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "adapters"


def with_demo(settings: Settings) -> Settings:
    """`settings` with the demo model (downloaded and converted at first use, progress on stderr) and its adapters.

    Raises ConfigError if the model cannot be prepared; the reason is on stderr.
    """
    command = [*_PREPARE, *(["--cache", settings.cache] if settings.cache else [])]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    folder = result.stdout.strip()
    if result.returncode != 0 or not folder:
        raise ConfigError(
            "The demo model could not be prepared. Pass --model with a folder of your own.", param="model"
        )
    print(f"The demo model lies in {folder}.", file=sys.stderr)  # what `punica adapters validate --model` wants
    adapters = settings.adapters or (str(_EXAMPLES) if _EXAMPLES.is_dir() else "")
    return dataclasses.replace(settings, model=folder, adapters=adapters)
