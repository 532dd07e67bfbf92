"""Behind ``cost``: counts what each topic stores and requests (``usage.py``, read by ``reading.py``) and prices it."""
