"""Generated JSON records: nine families of realistic nested records, seeded, pretty-printed or compact.

A record is a pure function of its seed. Hold-out is by seed and by content: training takes the seeds below
``HELD_OUT_SEED``, held-out text the seeds from there on, and names are drawn from two lists that share no entry.
"""

import json
import random
from typing import Any

from .words import (
    CITIES,
    COLORS,
    FIRST,
    FIRST_HELD_OUT,
    LAST,
    LAST_HELD_OUT,
    MESSAGES,
    PRODUCTS,
    SERVICES,
    STREETS,
    SUBJECTS,
    TAGS,
    TITLES,
    WORDS,
)

Record = dict[str, Any]

HELD_OUT_SEED = 10_000_000


def _person(r: random.Random, held_out: bool) -> tuple[str, str]:
    return (r.choice(FIRST_HELD_OUT), r.choice(LAST_HELD_OUT)) if held_out else (r.choice(FIRST), r.choice(LAST))


def _when(r: random.Random) -> str:
    day = f"20{r.randint(18, 26)}-{r.randint(1, 12):02d}-{r.randint(1, 28):02d}"
    return f"{day}T{r.randint(0, 23):02d}:{r.randint(0, 59):02d}:{r.randint(0, 59):02d}Z"


def _address(r: random.Random) -> Record:
    city, country, _, _ = r.choice(CITIES)
    return {
        "street": f"{r.randint(1, 240)} {r.choice(STREETS)} Street",
        "city": city,
        "postal_code": f"{r.randint(10000, 99999)}",
        "country": country,
    }


def _some(r: random.Random, items: list, low: int, high: int) -> list:
    return r.sample(items, r.randint(low, high))


def user(r: random.Random, held_out: bool) -> Record:
    """A user account."""
    first, last = _person(r, held_out)
    record = {
        "id": r.randint(1, 99999),
        "username": f"{first.lower()}.{last.lower()}",
        "name": f"{first} {last}",
        "email": f"{first.lower()}.{last.lower()}@example.{r.choice(['com', 'org', 'net'])}",
        "age": r.randint(18, 80),
        "active": r.random() < 0.8,
        "roles": _some(r, ["admin", "editor", "viewer", "author", "guest", "owner"], 1, 3),
        "address": _address(r),
        "preferences": {
            "language": r.choice(["en", "de", "fr", "es", "pt", "ja"]),
            "theme": r.choice(["light", "dark", "auto"]),
            "notifications": {"email": r.random() < 0.5, "sms": r.random() < 0.3},
        },
        "created_at": _when(r),
        "last_login": r.choice([None, _when(r)]),
    }
    if r.random() < 0.4:
        record["tags"] = _some(r, TAGS, 1, 4)
    return record


def order(r: random.Random, held_out: bool) -> Record:
    """A shop order whose totals add up."""
    first, last = _person(r, held_out)
    items: list[Record] = []
    for _ in range(r.randint(1, 4)):
        price, count = r.randint(199, 19999) / 100, r.randint(1, 5)
        items.append(
            {
                "sku": f"{r.choice('ABCDEFGH')}{r.choice('KLMNPQ')}-{r.randint(1000, 9999)}",
                "name": r.choice(PRODUCTS),
                "color": r.choice(COLORS),
                "quantity": count,
                "unit_price": price,
                "total": round(price * count, 2),
            }
        )
    subtotal = round(sum(i["total"] for i in items), 2)
    shipping = r.choice([0.0, 4.99, 9.9])
    return {
        "order_id": f"ORD-{r.randint(100000, 999999)}",
        "status": r.choice(["pending", "paid", "shipped", "delivered", "cancelled", "refunded"]),
        "customer": {
            "id": r.randint(1, 99999),
            "name": f"{first} {last}",
            "email": f"{first.lower()}.{last.lower()}@example.com",
        },
        "items": items,
        "shipping_address": _address(r),
        "payment": {
            "method": r.choice(["card", "paypal", "bank_transfer", "voucher"]),
            "currency": r.choice(["EUR", "USD", "GBP", "JPY"]),
        },
        "subtotal": subtotal,
        "shipping": shipping,
        "total": round(subtotal + shipping, 2),
        "ordered_at": _when(r),
    }


def sensor(r: random.Random, held_out: bool) -> Record:
    """A sensor with hourly readings that drift."""
    value, hour, day = (
        r.uniform(5, 30),
        r.randint(0, 15),
        f"20{r.randint(18, 26)}-{r.randint(1, 12):02d}-{r.randint(1, 28):02d}",
    )
    readings: list[Record] = []
    for k in range(r.randint(3, 8)):
        value += r.uniform(-1, 1)
        readings.append(
            {
                "time": f"{day}T{hour + k:02d}:00:00Z",
                "value": round(value, 2),
                "quality": r.choice(["good", "good", "good", "suspect", "bad"]),
            }
        )
    kind, unit = r.choice(
        [
            ("temperature", "celsius"),
            ("humidity", "percent"),
            ("pressure", "hPa"),
            ("voltage", "V"),
            ("wind_speed", "m/s"),
        ]
    )
    city, _, lat, lon = r.choice(CITIES)
    return {
        "sensor_id": f"{kind}-{r.randint(1, 999):03d}",
        "type": kind,
        "unit": unit,
        "location": {
            "site": city,
            "latitude": round(lat + r.uniform(-0.1, 0.1), 4),
            "longitude": round(lon + r.uniform(-0.1, 0.1), 4),
        },
        "battery": round(r.uniform(0.1, 1.0), 2),
        "firmware": f"{r.randint(1, 4)}.{r.randint(0, 9)}.{r.randint(0, 9)}",
        "readings": readings,
        "statistics": {
            "count": len(readings),
            "min": min(x["value"] for x in readings),
            "max": max(x["value"] for x in readings),
        },
    }


def geo(r: random.Random, held_out: bool) -> Record:
    """GeoJSON around a few cities."""
    features = []
    for _ in range(r.randint(1, 3)):
        city, country, lat, lon = r.choice(CITIES)
        point = [round(lon + r.uniform(-0.5, 0.5), 4), round(lat + r.uniform(-0.5, 0.5), 4)]
        line = [
            [round(point[0] + 0.01 * k, 4), round(point[1] + r.uniform(-0.01, 0.01), 4)] for k in range(r.randint(2, 4))
        ]
        geometry = r.choice([{"type": "Point", "coordinates": point}, {"type": "LineString", "coordinates": line}])
        features.append(
            {
                "type": "Feature",
                "geometry": geometry,
                "properties": {
                    "name": f"{city} {r.choice(['station', 'harbour', 'museum', 'park', 'airport', 'library'])}",
                    "country": country,
                    "population": r.randint(10, 9000) * 100,
                },
            }
        )
    return {"type": "FeatureCollection", "features": features}


def log(r: random.Random, held_out: bool) -> Record:
    """A log event."""
    level = r.choice(["DEBUG", "INFO", "INFO", "INFO", "WARNING", "ERROR"])
    record = {
        "timestamp": _when(r),
        "level": level,
        "service": r.choice(SERVICES),
        "host": f"{r.choice(WORDS)}-{r.randint(1, 20):02d}",
        "pid": r.randint(100, 32000),
        "message": r.choice(MESSAGES).format(n=r.randint(1, 5000)),
        "context": {
            "request_id": f"{r.getrandbits(32):08x}",
            "user_id": r.choice([None, r.randint(1, 9999)]),
            "duration_ms": r.randint(1, 4000),
        },
    }
    if level == "ERROR":
        record["error"] = {
            "type": r.choice(["ValueError", "KeyError", "TimeoutError", "ConnectionError", "PermissionError"]),
            "file": f"{r.choice(SERVICES)}/{r.choice(['views', 'models', 'tasks', 'client', 'utils'])}.py",
            "line": r.randint(10, 900),
        }
    return record


def config(r: random.Random, held_out: bool) -> Record:
    """A service's configuration."""
    name = f"{r.choice(SERVICES)}-{r.choice(WORDS)}"
    return {
        "name": name,
        "version": f"{r.randint(0, 5)}.{r.randint(0, 20)}.{r.randint(0, 9)}",
        "environment": r.choice(["development", "staging", "production"]),
        "debug": r.random() < 0.3,
        "server": {
            "host": r.choice(["localhost", "0.0.0.0", f"{name}.example.com"]),
            "port": r.choice([80, 443, 5000, 8000, 8080, 9000]),
            "workers": r.choice([1, 2, 4, 8, 16]),
            "timeout_seconds": r.choice([5, 10, 30, 60]),
        },
        "database": {
            "engine": r.choice(["postgresql", "mysql", "sqlite"]),
            "host": f"db-{r.choice(WORDS)}",
            "port": r.choice([3306, 5432]),
            "name": name.replace("-", "_"),
            "pool": {"min_size": r.randint(1, 5), "max_size": r.randint(6, 50)},
        },
        "cache": {"backend": r.choice(["redis", "memcached", "memory"]), "ttl": r.choice([60, 300, 600, 3600])},
        "logging": {
            "level": r.choice(["DEBUG", "INFO", "WARNING"]),
            "format": r.choice(["json", "text"]),
            "handlers": _some(r, ["console", "file", "syslog"], 1, 2),
        },
        "features": {
            k: r.random() < 0.5
            for k in _some(r, ["signup", "search", "exports", "uploads", "comments", "billing", "reports"], 2, 5)
        },
    }


def book(r: random.Random, held_out: bool) -> Record:
    """A catalogue entry."""
    first, last = _person(r, held_out)
    subject = r.choice(SUBJECTS)
    return {
        "title": f"{r.choice(TITLES)} {subject}",
        "authors": [{"first_name": first, "last_name": last}],
        "isbn": f"978-{r.randint(0, 9)}-{r.randint(1000, 9999)}-{r.randint(1000, 9999)}-{r.randint(0, 9)}",
        "published": r.randint(1960, 2026),
        "pages": r.randint(80, 900),
        "language": r.choice(["English", "German", "French", "Spanish"]),
        "subjects": [subject.lower(), *_some(r, ["reference", "textbook", "science", "hobby", "classic"], 1, 2)],
        "available": r.random() < 0.7,
        "price": {"amount": r.randint(500, 9000) / 100, "currency": r.choice(["EUR", "USD", "GBP"])},
        "ratings": {"average": round(r.uniform(2.5, 5), 1), "count": r.randint(0, 2000)},
    }


def pipeline(r: random.Random, held_out: bool) -> Record:
    """A build pipeline."""
    steps = [
        {
            "name": kind,
            "image": f"python:3.{r.randint(9, 13)}",
            "command": ["python", "-m", module, *_some(r, ["--verbose", "--strict", "--quiet", "--parallel"], 0, 2)],
            "timeout_minutes": r.choice([5, 10, 20, 30]),
            "retries": r.randint(0, 3),
        }
        for kind, module in r.sample(
            [
                ("lint", "ruff"),
                ("test", "pytest"),
                ("types", "mypy"),
                ("build", "build"),
                ("docs", "sphinx"),
                ("package", "pip"),
            ],
            r.randint(2, 4),
        )
    ]
    return {
        "pipeline": f"{r.choice(SERVICES)}-{r.choice(['ci', 'nightly', 'release'])}",
        "trigger": {
            "branch": r.choice(["main", "develop", "release"]),
            "on": _some(r, ["push", "pull_request", "schedule"], 1, 2),
        },
        "variables": {"CACHE": r.choice(["true", "false"]), "LOG_LEVEL": r.choice(["info", "debug"])},
        "steps": steps,
    }


def response(r: random.Random, held_out: bool) -> Record:
    """A page of an API response."""
    page, size, total = r.randint(1, 9), r.choice([2, 3, 4]), r.randint(20, 400)
    rows = []
    for _ in range(size):
        first, last = _person(r, held_out)
        rows.append(
            {
                "id": r.randint(1, 99999),
                "name": f"{first} {last}",
                "score": round(r.uniform(0, 100), 1),
                "tags": _some(r, TAGS, 0, 3),
            }
        )
    return {
        "status": "ok",
        "code": 200,
        "data": rows,
        "pagination": {
            "page": page,
            "page_size": size,
            "total": total,
            "next": f"/api/v{r.randint(1, 3)}/{r.choice(['users', 'players', 'members'])}?page={page + 1}",
        },
        "elapsed_ms": r.randint(1, 900),
    }


FAMILIES = (user, order, sensor, geo, log, config, book, pipeline, response)


def record(seed: int) -> tuple[str, str]:
    """The (family, text) of one document: a record, a list of two, or lines of compact records."""
    r, held_out = random.Random(seed), seed >= HELD_OUT_SEED
    family = r.choice(FAMILIES)
    style = r.random()
    if style < 0.6:
        text = json.dumps(family(r, held_out), indent=r.choice([2, 2, 4]))
    elif style < 0.75:
        text = json.dumps([family(r, held_out) for _ in range(2)], indent=2)
    else:
        text = "\n".join(json.dumps(family(r, held_out)) for _ in range(r.randint(2, 4)))
    return family.__name__, text + "\n"
