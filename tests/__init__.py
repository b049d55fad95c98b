"""The tests.

Many compare two programs that round alike only if a row's bits do not depend on the rows beside it.
On some processors MKL's products are not such, and routers then choose otherwise; this has it take
the same path on all of them, in processes that tests start, too.
"""

import os

os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
