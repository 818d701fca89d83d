"""A progress bar that says nothing."""


def tqdm(iterable, **ignored):
    return iterable
