import sys
from pathlib import Path

import pytest

from syncguard.digest import available_engines

sys.path.insert(0, str(Path(__file__).parent))

ENGINES = available_engines()


@pytest.fixture(params=ENGINES, ids=lambda engine: engine.name)
def engine(request):
    return request.param
