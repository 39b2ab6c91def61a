"""What a span is, as bytes: layout, header records, row order, sums tables, codec parameters."""
