# needs: weft
# Messages and RMA, every byte compared, over IPv4 and IPv6; without a domain name in the hints,
# rxe0 is chosen by its address.
run() {
	fipeer_both weft weft 10.77.0.1 transfer && fipeer_both weft weft fd77::1 transfer
}
