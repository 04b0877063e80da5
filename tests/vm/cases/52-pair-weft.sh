# guest: pair
# needs: weft
# seconds: 150
# weft between two guests, which have no memory in common: fi_pingpong and the tier's own program,
# over IPv4 and IPv6, and with libfabric's verbs provider on either side.
b() {
	pair_pingpong_server weft v4 && pair_pingpong_server weft v6 -6 &&
		pair_fipeer_server weft "$(rxe_addr4)" 4 && pair_fipeer_server weft "$(rxe_addr6)" 6 &&
		pair_fipeer_server verbs "$(rxe_addr4)" 7 && pair_fipeer_server weft "$(rxe_addr4)" 8
}
a() {
	pair_pingpong_client weft "$(peer_addr4)" v4 && pair_pingpong_client weft "$(peer_addr6)" v6 -6 &&
		pair_fipeer_client weft "$(peer_addr4)" 4 && pair_fipeer_client weft "$(peer_addr6)" 6 &&
		pair_fipeer_client weft "$(peer_addr4)" 7 && pair_fipeer_client verbs "$(peer_addr4)" 8
}
