"""One target under atheris in a process of its own: ``python -m fuzz.coverage MODULE TARGET``, then libFuzzer's.

The modules that decode are instrumented as they are imported; numba's kernels are not, because numba compiles their bytecode.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Final

import atheris

from fuzz.target import Target

INSTRUMENTED: Final = [
    "stratalog_core", "stratalog_metadata", "stratalog_bookies", "stratalog_tiering", "stratalog_broker", "stratalog_pipeline",
    "stratalog.local", "tomllib", "uuid",
]  # fmt: skip
COMPILED: Final = [
    "stratalog_core.batches.record_kernels", "stratalog_core.compiled.jit", "stratalog_core.compiled.siphash",
    "stratalog_core.compiled.varints", "stratalog_pipeline.arrow.encode_kernels", "stratalog_pipeline.arrow.kernels",
    "stratalog_tiering.core.offset_map",
]  # fmt: skip


def main() -> None:
    module, name = sys.argv.pop(1), sys.argv.pop(1)
    with atheris.instrument_imports(include=INSTRUMENTED, exclude=COMPILED):
        targets: tuple[Target, ...] = importlib.import_module(module).TARGETS
    target = next(target for target in targets if target.name == name)
    if not module.endswith("ports"):  # a port's own check looks at what is logged
        logging.disable(logging.ERROR)
    for content in target.inputs():
        target.execute(content)
    atheris.Setup(sys.argv, target.execute)
    atheris.Fuzz()


main()
