"""Chapter 26, config: one `ds_config.json` for DeepSpeed and minizero, with every key accounted for.

`load` turns a file into a configuration: `keys` is the table of all keys, `read` holds a file against it, `trial`
tries what it names. `schedules` are DeepSpeed's learning rates, and `explain` says of every key what becomes of it:

    python -m minizero.config ds_config.json --params 1.3B --ranks 8
"""

from typing import TYPE_CHECKING

from minizero._face import face

if TYPE_CHECKING:
    from minizero.config.load import BF16 as BF16
    from minizero.config.load import FP16 as FP16
    from minizero.config.load import Batch as Batch
    from minizero.config.load import Config as Config
    from minizero.config.load import Named as Named
    from minizero.config.load import OffloadOptimizer as OffloadOptimizer
    from minizero.config.load import Source as Source
    from minizero.config.load import ZeroOptimization as ZeroOptimization
    from minizero.config.load import load_config as load_config
    from minizero.config.load import load_for_engine as load_for_engine
    from minizero.config.load import main as main
    from minizero.config.load import optimizer_class as optimizer_class
    from minizero.config.load import scheduler_class as scheduler_class
    from minizero.config.read import ConfigError as ConfigError
    from minizero.config.schedules import WarmupCosineLR as WarmupCosineLR
    from minizero.config.schedules import WarmupDecayLR as WarmupDecayLR
    from minizero.config.schedules import WarmupLR as WarmupLR
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "load": (
                "BF16 Batch Config FP16 Named OffloadOptimizer Source ZeroOptimization load_config "
                "load_for_engine main optimizer_class scheduler_class"
            ),
            "read": "ConfigError",
            "schedules": "WarmupCosineLR WarmupDecayLR WarmupLR",
        },
    )
