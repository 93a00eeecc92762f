"""Does the cost model predict what is measured? Models, plans and emulated clusters; predicted beside measured."""
