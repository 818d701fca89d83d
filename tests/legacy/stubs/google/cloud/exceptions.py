"""The one exception that device_train.py catches."""


class NotFound(Exception):
    pass
