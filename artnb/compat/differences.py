"""What of ART artnb has not, and why."""


def reason(name: str) -> str:
    return ""
