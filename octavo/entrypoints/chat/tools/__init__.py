"""Tool calls in the texts that models write: formats as data (`formats`), and what reads (`reading`, `forced`), writes
(`writing`) and recognises (`recognition`) them."""
