# needs: weft
# fi_pingpong on rxe0 within one guest, over IPv4 and IPv6.
run() {
	pingpong weft 10.77.0.1 -I 5 && pingpong weft fd77::1 -6 -I 5
}
