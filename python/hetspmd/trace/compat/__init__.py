"""Every private torch import of the project, by what it is for.

Nothing else in hetspmd imports a module or a name of torch that begins with an underscore. The version is looked at
before any of them.
"""

import hetspmd.trace.compat.version  # noqa: F401  # before the others
