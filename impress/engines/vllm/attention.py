"""(stub)"""


def register_backend() -> None:
    pass


def check_backend() -> None:
    pass
