"""What files of sentences contain, for `mtrain init`: kinds, columns, languages, source and target, roles."""
