"""The reference page of errors: the command's exit codes and the error tree between processes, from the code."""

from __future__ import annotations

import inspect
import re

from stratalog import exit_codes
from stratalog.exit_codes import ExitCode, exit_code_of
from stratalog_core import errors
from stratalog_core.errors import StratalogError

_HEAD = """# Errors

## Exit codes of `stratalog`

On 3, a script can try again. If the command changes something, the script has to look first whether it already has: an error
whose outcome is unknown exits with 3, too. On 6 and 7, the data needs attention. On any other code, the message says what to
change first.

Generated from the code by `make reference`.

| code | name | meaning |
| --- | --- | --- |
"""

_TREE = """
## Errors between processes

Between Stratalog's processes an error travels as a code, a message and a map of details. The code tells the caller what to do:

```text
{tree}
```

| code | is a | `stratalog` exits with |
| --- | --- | --- |
"""

_KAFKA = """
## Errors to Kafka clients

Kafka clients get Kafka's error codes. Where a response has an error message, it names the value, the limit and the remedy.
"""


def errors_page() -> str:
    """The page's text."""
    codes = "".join(f"| {code.value} | {code.name} | {_meaning(code)} |\n" for code in ExitCode)
    tree = (errors.__doc__ or "").split("::\n\n")[1].split("\n\n")[0]
    kinds = _kind_row(StratalogError) + "".join(map(_kind_row, _subclasses(StratalogError)))
    return _HEAD + codes + _TREE.format(tree=inspect.cleandoc(tree)) + kinds + _KAFKA


def _meaning(code: ExitCode) -> str:
    """The string below the member in the enumeration's source."""
    found = re.search(rf'{code.name} = {code.value}\n    """(.*?)"""', inspect.getsource(exit_codes))
    return found[1].replace("|", "\\|") if found else "Done." if code is ExitCode.OK else "Interrupted by Ctrl-C."


def _subclasses(kind: type[StratalogError]) -> list[type[StratalogError]]:
    """The classes below ``kind`` that the error module defines, parents first."""
    own = [each for each in kind.__subclasses__() if each.__module__ == errors.__name__]
    return [found for each in own for found in (each, *_subclasses(each))]


def _kind_row(kind: type[StratalogError]) -> str:
    (parent,) = kind.__bases__
    is_a = f"`{parent.code}`" if issubclass(parent, StratalogError) else ""
    return f"| `{kind.code}` | {is_a} | {exit_code_of(kind()).value} |\n"
