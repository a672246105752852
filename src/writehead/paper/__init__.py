"""What ties this library to the paper: its listings, its rows, its figures."""
