//! Messages of the connection manager.

/// A packet that can be decoded encodes to the same bytes. No other packet can be decoded.
///
/// # Panics
/// If this property does not hold.
pub fn cm_message(data: &[u8]) {
    crate::cm::check_packet(data);
    // Most inputs fail at the first bytes. So they are tried again with a valid header, and with
    // the lengths of the message kinds.
    let Some((&kind, body)) = data.split_first() else {
        return;
    };
    let mut packet = b"SVCM\x02\x00".to_vec();
    packet.extend([kind % 6, 0, 0, 0, 0, 0]);
    packet.extend(body);
    crate::cm::check_packet(&packet);
    for len in [12, 12 + 152, 12 + 231, 12 + 136] {
        packet.resize(len, 0);
        crate::cm::check_packet(&packet);
    }
}
