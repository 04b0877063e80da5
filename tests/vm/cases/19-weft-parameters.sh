# needs: weft
# FI_WEFT_GID_INDEX and FI_WEFT_INTERFACE: rxe0 is listed only with the addresses that they select,
# and transfers through these work.
offered() {
	with weft fi_info -p weft -d rxe0 -t FI_EP_MSG -v 2>&1 | sed -n 's/.*src_addr: *\(fi_sockaddr[^ ]*\).*/\1/p' | sort -u | sed 's,.*://,,' | tr '\n' ' '
}

index_of() {
	for file in /sys/class/infiniband/rxe0/ports/1/gids/*; do
		[ "$(cat "$file")" = "$1" ] && basename "$file" && return
	done
	echo "no GID $1" >&2
	return 1
}

expect() {
	echo "$1: offered at $2"
	[ "$2" = "$3" ] || { echo "wanted $3"; return 1; }
}

run() {
	v4=$(index_of 0000:0000:0000:0000:0000:ffff:0a4d:0001) && v6=$(index_of fd77:0000:0000:0000:0000:0000:0000:0001) || return 1
	expect "entry $v4" "$(FI_WEFT_GID_INDEX=$v4 offered)" "10.77.0.1:0 " || return 1
	expect "entry $v6" "$(FI_WEFT_GID_INDEX=$v6 offered)" "[fd77::1]:0 " || return 1
	expect "entry 200, which is none" "$(FI_WEFT_GID_INDEX=200 offered)" "" || return 1
	expect "interface v1, which is not rxe0's" "$(FI_WEFT_INTERFACE=v1 offered)" "" || return 1
	both=$(FI_WEFT_INTERFACE=v0 offered)
	echo "interface v0: offered at $both"
	for address in 10.77.0.1:0 "[fd77::1]:0"; do
		case " $both" in *" $address "*) ;; *) return 1 ;; esac
	done
	FI_WEFT_GID_INDEX=$v6 FI_WEFT_INTERFACE=v0 fipeer_both weft weft fd77::1 transfer || return 1
	# the address of the other GID is not listed
	if FI_WEFT_GID_INDEX=$v4 with weft fi_info -p weft -d rxe0 -n fd77::1; then
		echo "fd77::1 is offered all the same"
		return 1
	fi
}
